"""What surefoot catches: known faults put into healthy runs at mid-training, default settings.

    python benchmarks/caught.py

The other side of `false_alarms.py`: a tool that is silent on everything has no false alarms either. A fault is caught
when one of its steps is not applied, or when an alarm above `info` is raised from then on that the clean run does not
raise. The last columns say what it did to the loss at the end (median over the last tenth), against the clean run.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from healthy_runs import HEALTHY
from training_loops import Batch, Fault, Result, Run, train_bare, train_guarded

if TYPE_CHECKING:
    from torch import Tensor, nn

RUNS = (
    "fast_fall",
    "batch_of_four",
    "batch_of_two_noisy_labels",
    "warm_restarts",
    "hinge_mostly_zero",
    "ragged_last_batch",
    "dropout_batchnorm_cnn",
    "zero_initialised_branches",
    "loss_to_1e_4",
    "heavy_tailed_noise",
    "vae",
    "contrastive",
    "char_lstm_clipped",
    "transformer_warmup_cosine",
    "ppo_growing_returns",
)


@dataclass
class Injected(Fault):
    """One of the faults below, from step `at` on."""

    kind: str
    at: int

    def batch(self, step: int, batch: Batch) -> Batch:
        if step != self.at:
            return batch
        scale = {"inputs x 1,000": 1e3, "inputs x 1e6": 1e6}.get(self.kind)
        if scale and batch[0].is_floating_point():
            return batch[0] * scale, *batch[1:]
        if self.kind == "random labels" and len(batch) > 1:
            return batch[0], batch[1][torch.randperm(len(batch[1]))], *batch[2:]
        return batch

    def loss(self, step: int, loss: Tensor) -> Tensor:
        return loss * math.inf if step == self.at and self.kind == "Inf loss" else loss

    def gradients(self, step: int, model: nn.Module) -> None:
        if step != self.at:
            return
        scale = {"NaN gradient": math.nan, "gradient x 10,000": 1e4, "gradient x 1,000": 1e3}.get(self.kind, 1.0)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    def lr_factor(self, step: int) -> float:
        return 100.0 if self.kind == "LR x 100, 20 steps" and self.at <= step < self.at + 20 else 1.0

    def touches(self, first: Batch) -> bool:
        """Whether there is anything in this run that the fault can break."""
        if self.kind.startswith("inputs"):
            return first[0].is_floating_point()
        return self.kind != "random labels" or (len(first) > 1 and not first[1].is_floating_point())


FAULTS = (
    "NaN gradient",
    "Inf loss",
    "gradient x 10,000",
    "gradient x 1,000",
    "inputs x 1,000",
    "inputs x 1e6",
    "random labels",
    "LR x 100, 20 steps",
)


def caught(fault: Injected, faulty: Result, clean: Result) -> bool:
    """Whether a faulty step was left out, or anything was said about it that the clean run does not say."""
    skipped = any(step >= fault.at for step in faulty.skipped_at)
    return skipped or bool(faulty.alarms - clean.alarms) or faulty.halted


def end_loss(result: Result) -> float:
    """Median over the last tenth, Inf for what is broken."""
    last = result.losses[-max(len(result.losses) // 10, 1) :]
    return median(value if math.isfinite(value) else math.inf for value in last)


def _train_until_crash(run: Run, seed: int, steps: int, fault: Fault) -> Result:
    """The bare loop; a crash (sampling from NaN probabilities) is as bad an end as any."""
    try:
        return train_bare(run, seed, steps, fault)
    except RuntimeError:
        return Result([math.inf], [])


def ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=RUNS, default=RUNS, metavar="RUN")
    parser.add_argument("--each", action="store_true", help="a line per run too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    clean = {name: train_guarded(HEALTHY[name], options.seed, options.steps) for name in options.only}
    print(f"{'fault':<22}{'caught':>9}   median of end loss / clean end loss: guarded, bare")
    for kind in FAULTS:
        found, guarded_ratios, bare_ratios = [], [], []
        for name in options.only:
            fault = Injected(kind, options.steps // 2 + 1)
            run = HEALTHY[name]
            if not fault.touches(run(options.seed, options.steps)[0].batch()):
                continue
            guarded = train_guarded(run, options.seed, options.steps, fault)
            bare = _train_until_crash(run, options.seed, options.steps, fault)
            found.append(caught(fault, guarded, clean[name]))
            base = end_loss(clean[name])
            guarded_ratios.append(ratio(end_loss(guarded), base))
            bare_ratios.append(ratio(end_loss(bare), base))
            if options.each:
                print(f"  {name:<28}{found[-1]!s:<6}{guarded_ratios[-1]:>10.3g}{bare_ratios[-1]:>10.3g}")
        worse = f"{_middle(guarded_ratios):>8.3g} {_middle(bare_ratios):>8.3g}"
        worst = f"worst {max(guarded_ratios):.3g}, {max(bare_ratios):.3g}"
        print(f"{kind:<22}{sum(found):>4} / {len(found):<3}{worse}   ({worst})", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")


def _middle(values: list[float]) -> float:
    return median(value for value in values if not math.isnan(value))


if __name__ == "__main__":
    main()
