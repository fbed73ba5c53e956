"""What surefoot catches: known faults put into healthy runs at mid-training, default settings.

    python benchmarks/caught.py
    python benchmarks/caught.py --seeds 3 --only fast_fall vae --faults "random labels" --each

The other side of `false_alarms.py`: a tool that is silent on everything has no false alarms either. A fault is caught
when one of its steps is not applied, or when an alarm above `info` is raised from then on that the clean run does not
raise. Not every fault does harm: ten thousand times a gradient of 0 is 0, and scaled inputs do not matter behind a
norm. A fault did harm if the bare run ends with a loss (median over the last tenth, on the same batches) more than 5 %
above that of the clean run. So three things are counted: the harmful faults that were caught, the harmful ones whose
guarded run still ends more than 5 % above the clean one, caught or not, and the harmless ones that were caught, too.
The last columns are the loss at the end over that of the clean run, median and worst, of all faults of a kind.
"""

from __future__ import annotations

import argparse
import itertools
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


HARM = 0.05
"""The share by which the loss at the end is above that of the clean run, from which a fault did harm."""


@dataclass(frozen=True)
class Case:
    """One fault in one run: whether it was caught, and how the runs ended."""

    caught: bool
    clean: float
    guarded: float
    bare: float

    @property
    def did_harm(self) -> bool:
        """Whether the bare run ends worse than the clean one."""
        return self._is_worse(self.bare)

    @property
    def remains(self) -> bool:
        """Whether the guarded run does."""
        return self._is_worse(self.guarded)

    def _is_worse(self, end: float) -> bool:
        return end > self.clean + HARM * abs(self.clean)


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


def measure(kind: str, name: str, seed: int, steps: int, clean: Result) -> Case | None:
    """Train with a fault, guarded and bare; `None` if there is nothing in the run that it can break."""
    fault, run = Injected(kind, steps // 2 + 1), HEALTHY[name]
    if not fault.touches(run(seed, steps)[0].batch()):
        return None
    guarded = train_guarded(run, seed, steps, fault)
    bare = _train_until_crash(run, seed, steps, fault)
    return Case(caught(fault, guarded, clean), end_loss(clean), end_loss(guarded), end_loss(bare))


def line(kind: str, cases: list[Case]) -> str:
    """One line of the table."""
    harmful = [case for case in cases if case.did_harm]
    harmless = [case for case in cases if not case.did_harm]
    found, also = (_share(sum(case.caught for case in part), len(part)) for part in (harmful, harmless))
    remains = _share(sum(case.remains for case in harmful), len(harmful))
    guarded = [ratio(case.guarded, case.clean) for case in cases]
    bare = [ratio(case.bare, case.clean) for case in cases]
    ends = f"{_middle(guarded):>8.3g} ({_worst(guarded):.3g}){_middle(bare):>9.3g} ({_worst(bare):.3g})"
    return f"{kind:<22}{found:>10}{remains:>10}{also:>10}   {ends}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=RUNS, default=RUNS, metavar="RUN")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=FAULTS, metavar="FAULT")
    parser.add_argument("--each", action="store_true", help="a line per run too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    runs = list(itertools.product(options.only, range(options.seed, options.seed + options.seeds)))
    clean = {(name, seed): train_guarded(HEALTHY[name], seed, options.steps) for name, seed in runs}
    print(f"{'':<22}{'harmful:':>10}{'still':>10}{'harmless:':>10}   end loss / clean end loss, median (worst)")
    print(f"{'fault':<22}{'caught':>10}{'harmed':>10}{'caught':>10}   guarded, bare")
    for kind in options.faults:
        found = {run: measure(kind, *run, options.steps, clean[run]) for run in runs}
        cases = {run: case for run, case in found.items() if case is not None}
        for (name, seed), case in cases.items() if options.each else ():
            ends = f"{ratio(case.guarded, case.clean):>10.3g}{ratio(case.bare, case.clean):>10.3g}"
            print(f"  {name:<28}{seed:<4}{'caught' if case.caught else '':<8}{ends}")
        if cases:
            print(line(kind, list(cases.values())), flush=True)
    print(f"{time.perf_counter() - began:.0f} s")


def _share(part: int, whole: int) -> str:
    return f"{part} / {whole}"


def _known(values: list[float]) -> list[float]:
    """Without the ratios to a clean loss of 0."""
    return [value for value in values if not math.isnan(value)] or [math.nan]


def _middle(values: list[float]) -> float:
    return median(_known(values))


def _worst(values: list[float]) -> float:
    return max(_known(values))


if __name__ == "__main__":
    main()
