"""Flipped bits: which are found, within how many steps, and what those do that are not.

    python benchmarks/bit_flips.py
    python benchmarks/bit_flips.py --runs fast_fall batch_of_four --seeds 5 --jobs 16

In the middle of a healthy run bits of a float32 are flipped, one or forty at random places: in the weights, the first
or the second moments, the gradients or the inputs of one batch. Each run trains three times: clean, with the flip in
the bare loop, and with it under `TrainingStabilizer` with recovery, all settings at their default. Printed for each
place, bit and count: in how many runs the guard did something about it or raised an alarm that the clean run does not
raise, within 0, 20 and 100 steps; the loss at the end over that of the clean run, guarded and bare (median and worst);
and whether fingerprints of the weights and of the optimizer's state (`observe/fingerprints.py`), taken before and after
the flip, differ. Ranks that hold the same weights compare those on sampled steps. A run in one process has nothing to
compare with, since a loop may change weights between two steps on purpose.

Bit 31 is the sign, 30 to 23 are the exponent, 22 to 0 the fraction.
"""

from __future__ import annotations

import argparse
import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

import torch
from healthy_runs import HEALTHY
from training_loops import Batch, Fault, Learner, Result, train_bare, train_guarded

from surefoot.observe.fingerprints import fingerprints, state_fingerprints

if TYPE_CHECKING:
    from torch import Tensor, nn

PLACES = ("weights", "first moments", "second moments", "gradients", "batch")
BITS = (31, 30, 29, 26, 23, 22, 10)
COUNTS = (1, 40)
WITHIN = (0, 20, 100)
MOMENTS = {
    "first moments": ("exp_avg", "momentum_buffer"),
    "second moments": ("exp_avg_sq", "square_avg"),
}


def flip(tensors: list[Tensor], bit: int, count: int, seed: int) -> None:
    """Flip one bit of so many entries, each in a tensor and at a place of its own."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        chosen = tensors[int(torch.randint(len(tensors), (), generator=generator))]
        entries = chosen.view(-1).view(torch.int32)
        mask = (1 << bit) - (1 << 32) * (bit == 31)  # the highest bit of an int32 is its sign
        entries[int(torch.randint(len(entries), (), generator=generator))] ^= mask


@dataclass
class Flip(Fault):
    """Bits that are flipped at step `at`, once."""

    place: str
    bit: int
    count: int
    at: int
    seed: int
    applies: bool = False
    """Whether there was anything to flip."""
    differs: bool | None = None
    """Whether fingerprints show it; `None` where none are taken."""

    def learner(self, step: int, learner: Learner) -> None:
        if step != self.at or self.place not in ("weights", *MOMENTS):
            return
        parameters = [each for each in learner.model.parameters() if each.requires_grad]
        states = [learner.optimizer.state[each] for each in parameters]
        names = MOMENTS.get(self.place, ())
        moments = [state[name] for state in states for name in names if isinstance(state.get(name), torch.Tensor)]
        tensors = [each.data for each in parameters] if self.place == "weights" else moments
        before = self._fingerprints(learner, parameters)
        self._flip(tensors)
        self.differs = not torch.equal(before, self._fingerprints(learner, parameters))

    @staticmethod
    def _fingerprints(learner: Learner, parameters: list[nn.Parameter]) -> Tensor:
        home = parameters[0].device
        return torch.cat([fingerprints(parameters, home), state_fingerprints(learner.optimizer, parameters, home)])

    def batch(self, step: int, batch: Batch) -> Batch:
        if step != self.at or self.place != "batch" or batch[0].dtype is not torch.float32:
            return batch
        inputs = batch[0].clone()
        self._flip([inputs])
        return inputs, *batch[1:]

    def gradients(self, step: int, model: nn.Module) -> None:
        if step == self.at and self.place == "gradients":
            self._flip([each.grad for each in model.parameters() if each.grad is not None])

    def _flip(self, tensors: list[Tensor]) -> None:
        if tensors:
            flip(tensors, self.bit, self.count, self.seed)
            self.applies = True


class Row(NamedTuple):
    """What became of one flip."""

    delay: int | None
    guarded: float
    bare: float
    differs: bool | None


def end_loss(result: Result) -> float:
    """Mean over the last tenth, `inf` for what is broken."""
    last = result.losses[-max(len(result.losses) // 10, 1) :]
    return fmean(value if math.isfinite(value) else math.inf for value in last)


def measure(name: str, seed: int, steps: int) -> list[tuple[str, int, int, Row]]:
    """Every flip in one run."""
    torch.set_num_threads(1)
    run, at = HEALTHY[name], steps // 2
    clean = train_guarded(run, seed, steps)
    usual = {*clean.skipped_at, *clean.returned_at, *clean.alarmed_at}
    rows = []
    for place, bit, count in product(PLACES, BITS, COUNTS):
        fault = Flip(place, bit, count, at, seed)
        found = train_guarded(run, seed, steps, fault)
        if not fault.applies:
            continue
        bare = train_bare(run, seed, steps, Flip(place, bit, count, at, seed))
        seen = sorted({*found.skipped_at, *found.returned_at, *found.alarmed_at} - usual)
        delay = next((step - at for step in seen if step >= at), None)
        base = end_loss(clean)
        rows.append((place, bit, count, Row(delay, end_loss(found) / base, end_loss(bare) / base, fault.differs)))
    return rows


def line(place: str, bit: int, count: int, rows: list[Row]) -> str:
    """One line of the table."""
    found = [sum(row.delay is not None and row.delay <= within for row in rows) for within in WITHIN]
    ends = [[row.guarded for row in rows], [row.bare for row in rows]]
    cells = [f"{median(values):.4g} ({max(values):.3g})" for values in ends]
    differ = [row.differs for row in rows if row.differs is not None]
    shown = f"{sum(differ)}/{len(differ)}" if differ else "-"
    counts = "".join(f"{each}/{len(rows)}".rjust(8) for each in found)
    return f"{place:<16}{bit:>4}{count:>6}{counts}{cells[0]:>18}{cells[1]:>18}{shown:>10}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", nargs="*", choices=sorted(HEALTHY), default=["fast_fall", "batch_of_four"])
    options = parser.parse_args()
    began = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        tasks = [
            pool.submit(measure, name, seed, options.steps) for name in options.runs for seed in range(options.seeds)
        ]
        rows = [row for task in tasks for row in task.result()]
    titles = "".join(f"<= {within}".rjust(8) for within in WITHIN)
    print(f"{'place':<16}{'bit':>4}{'flips':>6}{titles}{'guarded / clean':>18}{'bare / clean':>18}{'prints':>10}")
    for place, bit, count in product(PLACES, BITS, COUNTS):
        mine = [row for *cell, row in rows if tuple(cell) == (place, bit, count)]
        if mine:
            print(line(place, bit, count, mine))
    escaped = [row for *_, row in rows if row.delay is None and not row.guarded <= 1.05]
    print(f"{len(rows)} flips; {len(escaped)} were not found by the guard and cost more than 5 %")
    print(f"{time.perf_counter() - began:.0f} s, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")


if __name__ == "__main__":
    main()
