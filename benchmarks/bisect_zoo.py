"""How often `surefoot bisect` names a change that is among the fixes of the true cause.

    PYTHONPATH=src python benchmarks/bisect_zoo.py [--jobs N] [--budget SECONDS] [--seed N] [--json FILE] [NAME ...]

Faulty scripts of the zoo whose cause can be cured from outside, and healthy ones, each as a user would type it, with
one run at a time inside (`--jobs` is how many scripts are bisected side by side). A faulty script counts if a change
that cures it is among the fixes of its cause; a healthy one if the answer is that the script does not fail; both if the
time stayed within the budget. (The file is not called `bisect.py`: it would hide the standard library's module.)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from surefoot.experiments.change_causes import FIXES
from surefoot.zoo import HEALTHY, Specimen, find

SOURCE = str(Path(__file__).parents[1] / "src")
SLACK_SECONDS = 3.0
"""For starting Python and writing the result."""
ENOUGH = 12
"""So many faulty scripts must be cured for the exit code to be 0."""

FAULTY = (
    "tuning/lr.too-high/digits_sgd",
    "testing/lr.too-high/tiny_gpt",
    "tuning/lr.no-warmup/postnorm_copy",
    "testing/lr.no-warmup/pointer_reader",
    "tuning/precision.fp16-overflow/digits_rms_norm",
    "testing/precision.fp16-overflow/half_contrastive",
    "tuning/precision.fp16-underflow/image_autoencoder",
    "testing/precision.fp16-underflow/half_copy_regression",
    "tuning/precision.low-precision-weights/bf16_digits",
    "testing/precision.low-precision-weights/bf16_sine_mlp",
    "tuning/precision.scaler-stuck/amp_regression",
    "testing/precision.scaler-stuck/pulse_counter",
    "tuning/data.bad-batch/sensor_regression",
    "testing/data.bad-batch/diabetes_shards",
    "tuning/data.nonfinite-input/tumour_log_features",
    "testing/data.nonfinite-input/power_gru",
    "tuning/data.unshuffled/digits_by_class",
    "tuning/model.exploding-gradient/load_cell",
    "testing/model.exploding-gradient/residual_recurrence",
    "tuning/model.attention-logit-growth/noisy_lookup",
    "testing/model.attention-logit-growth/set_majority",
    "tuning/optim.epsilon/digits_autoencoder",
    "testing/optim.epsilon/two_view_contrast",
    "tuning/optim.stale-state/two_sittings",
    "testing/optim.stale-state/three_cycles",
    "tuning/loss.sum-reduction/digits_cnn",
    "tuning/loss.no-valid-targets/masked_words",
    "testing/loss.no-valid-targets/partly_labelled",
)
HEALTHY_ONES = (
    "tuning/healthy/bilstm_names",
    "tuning/healthy/accumulated_convnet",
    "testing/healthy/noisy_line",
    "testing/healthy/small_decoder",
    "testing/healthy/tight_clip_sgd",
    "testing/healthy/fp16_conv_scaler",
)


@dataclass
class Score:
    """What came of one script."""

    name: str
    truth: str
    answer: str = ""
    cures: list[str] = field(default_factory=list)
    confirms: list[str] = field(default_factory=list)
    named: str = ""
    seconds: float = 0.0
    in_budget: bool = False
    sentence: str = ""
    trouble: str = ""

    @property
    def right(self) -> bool:
        if self.truth == HEALTHY:
            return self.answer == "healthy"
        return any(change in FIXES.get(self.truth, {}) for change in self.cures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of scripts' names; all that are listed, if none is given")
    parser.add_argument("--jobs", type=int, default=1, help="scripts side by side")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for each script")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--only", default="", help="only these changes")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    asked = parser.parse_args()
    chosen = [specimen for specimen in specimens() if not asked.names or any(n in specimen.name for n in asked.names)]
    with ThreadPoolExecutor(asked.jobs) as pool:
        scores = []
        for score in pool.map(lambda held: bisect(held, asked.seed, asked.budget, asked.only), chosen):
            scores.append(score)
            print(line(score), flush=True)
    faulty = [score for score in scores if score.truth != HEALTHY]
    healthy = [score for score in scores if score.truth == HEALTHY]
    print(f"faulty: {sum(s.right for s in faulty)} of {len(faulty)} cured by a change among the cause's fixes")
    print(f"healthy: {sum(s.right for s in healthy)} of {len(healthy)} need no curing")
    print(f"within the budget: {sum(s.in_budget for s in scores)} of {len(scores)}")
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(score) | {"right": score.right} for score in scores], indent=1))
    enough = sum(score.right for score in faulty) >= min(ENOUGH, len(faulty))
    return 0 if enough and all(s.right for s in healthy) and all(s.in_budget for s in scores) else 1


def specimens() -> list[Specimen]:
    return [find(name) for name in (*FAULTY, *HEALTHY_ONES)]


def bisect(specimen: Specimen, seed: int, budget: float, only: str) -> Score:
    score = Score(specimen.name, specimen.truth)
    command = [sys.executable, "-m", "surefoot", "bisect", "--json", "--jobs", "1", "--budget", str(budget)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as place:
        began = time.monotonic()
        ended = subprocess.run(
            [*command, *(["--only", only] if only else []), str(specimen.path), str(seed)],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
        )
        score.seconds = time.monotonic() - began
    score.in_budget = score.seconds <= budget + SLACK_SECONDS
    try:
        told = json.loads(ended.stdout)
    except json.JSONDecodeError:
        score.trouble = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        return score
    score.answer, score.sentence = told["answer"], told["sentence"]
    score.cures, score.confirms = told["cures"], told["confirms"]
    serious = [finding["cause"] for finding in told["findings"] if finding["severity"] != "info"]
    score.named = serious[0] if serious else ""
    return score


def line(score: Score) -> str:
    mark = "ok  " if score.right else "MISS"
    late = "" if score.in_budget else " OVER BUDGET"
    said = score.trouble or score.sentence
    return f"{mark} {score.name} ({score.seconds:.0f} s{late}): {said} [first finding {score.named or 'none'}]"


if __name__ == "__main__":
    raise SystemExit(main())
