"""Damage that no single step shows: is it seen under the noise of the batches, how late, and is it cured?

    python benchmarks/slow_damage.py
    python benchmarks/slow_damage.py --seeds 5 --models transformer cnn dqn --faults "rate x 100, 20 steps"

At two fifths of a run a fault damages the weights, or goes on damaging them for a while. Each run trains three times:
clean, with the fault in the bare loop, and with it under `TrainingStabilizer` with recovery, all settings at their
default. Printed: in how many runs it was seen (a return, a refused step, or an alarm that the clean run does not
raise), in how many it led to a return, after how many steps (median and latest), and the loss at the end over that of
the clean run, guarded and bare (median and worst).
"""

from __future__ import annotations

import argparse
import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from multiprocessing import get_context
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

import torch
from healthy_runs import HEALTHY
from training_loops import Fault, Learner, Result, train_bare, train_guarded

if TYPE_CHECKING:
    from torch import Tensor, nn

MODELS = {
    "transformer": "transformer_warmup_cosine",
    "cnn": "dropout_batchnorm_cnn",
    "dqn": "dqn_large_rewards",
    "ppo": "ppo_growing_returns",
    "lstm": "char_lstm_clipped",
    "batch of four": "batch_of_four",
    "heavy dropout": "heavy_dropout",
    "gan": "gan",
}
FAULTS = (
    "rate x 100, 20 steps",
    "rate x 30, 20 steps",
    "second moments / 10,000",
    "moments of other weights",
    "resumed from early weights",
    "one gradient step uphill x 300",
    "drift uphill, 150 steps",
    "40 flipped weight bits",
)
EARLY = 20


@dataclass
class Damage(Fault):
    """One of the faults, from step `at` on. It strikes every learner."""

    kind: str
    at: int
    early: dict[int, list[Tensor]] = field(default_factory=dict)

    def lr_factor(self, step: int) -> float:
        factor = {"rate x 100, 20 steps": 100.0, "rate x 30, 20 steps": 30.0}.get(self.kind, 1.0)
        return factor if self.at <= step < self.at + 20 else 1.0

    @torch.no_grad()
    def learner(self, step: int, learner: Learner) -> None:
        parameters = list(learner.model.parameters())
        if step == EARLY:
            self.early[id(learner)] = [each.clone() for each in parameters]
        if step != self.at:
            return
        if self.kind == "resumed from early weights":
            torch._foreach_copy_(parameters, self.early[id(learner)])
        elif self.kind == "40 flipped weight bits":
            _flip(parameters, 40)
        for state in learner.optimizer.state.values():
            if self.kind == "second moments / 10,000" and "exp_avg_sq" in state:
                state["exp_avg_sq"].mul_(1e-4)
            if self.kind == "moments of other weights" and "exp_avg_sq" in state:
                order = torch.randperm(state["exp_avg"].numel(), generator=torch.Generator().manual_seed(0))
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name].copy_(state[name].flatten()[order].view_as(state[name]))

    def gradients(self, step: int, model: nn.Module) -> None:
        drift = self.kind == "drift uphill, 150 steps" and self.at <= step < self.at + 150
        once = self.kind == "one gradient step uphill x 300" and step == self.at
        for parameter in model.parameters():
            if parameter.grad is not None and (drift or once):
                parameter.grad.mul_(-1.0 if drift else -300.0)


def _flip(parameters: list[Tensor], count: int) -> None:
    """Flip the highest bit of the exponent that is 0 in some weights: each grows by many orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        weight = parameters[int(torch.randint(len(parameters), (), generator=generator))].view(-1)
        place = int(torch.randint(len(weight), (), generator=generator))
        bits = weight[place : place + 1].view(torch.int32)
        bits ^= 1 << 27  # an exponent that is 16 higher or lower: x 65,536 or almost 0


class Row(NamedTuple):
    """What became of one run."""

    seen: bool
    delay: int | None
    """Steps from the beginning of the fault to the first return; `None` without one."""
    guarded: float
    bare: float
    halted: bool


def end_loss(result: Result) -> float:
    """Mean over the last tenth, `inf` for what is broken."""
    last = result.losses[-max(len(result.losses) // 10, 1) :]
    return fmean(value if math.isfinite(value) else math.inf for value in last)


def measure(model: str, kind: str, seed: int, steps: int) -> Row:
    """One fault in one run."""
    torch.set_num_threads(1)
    run, at = HEALTHY[MODELS[model]], 2 * steps // 5
    clean = train_guarded(run, seed, steps)
    faulty = train_guarded(run, seed, steps, Damage(kind, at))
    try:
        bare = end_loss(train_bare(run, seed, steps, Damage(kind, at)))
    except RuntimeError:  # sampling from probabilities that are NaN
        bare = math.inf
    returns = [step for step in faulty.returned_at if step >= at]
    refused = [step for step in faulty.skipped_at if step >= at]
    seen = bool(returns or refused or faulty.alarms - clean.alarms)
    base = end_loss(clean)
    return Row(seen, returns[0] - at if returns else None, end_loss(faulty) / base, bare / base, faulty.halted)


def line(model: str, kind: str, rows: list[Row]) -> str:
    """One line of the table."""
    delays = sorted(row.delay for row in rows if row.delay is not None)
    late = f"{median(delays):.0f} ({delays[-1]})" if delays else "-"
    ends = [row.guarded for row in rows], [row.bare for row in rows]
    cells = [f"{median(values):.3f} ({max(values):.3g})" for values in ends]
    halted = f"   {sum(row.halted for row in rows)} HALTED" if any(row.halted for row in rows) else ""
    seen = f"{sum(row.seen for row in rows)}/{len(rows)}"
    return f"{kind:<32}{model:<15}{seen:>6}{len(delays):>9}{late:>12}{cells[0]:>18}{cells[1]:>20}{halted}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=["transformer", "cnn", "dqn"])
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    options = parser.parse_args()
    began = time.perf_counter()
    head = f"{'fault':<32}{'model':<15}{'seen':>6}{'returned':>9}{'after steps':>12}"
    print(f"{head}{'guarded / clean':>18}{'bare / clean':>20}")
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        cells = list(product(options.faults, options.models))
        runs = {
            (kind, model): [pool.submit(measure, model, kind, seed, options.steps) for seed in range(options.seeds)]
            for kind, model in cells
        }
        for kind, model in cells:
            print(line(model, kind, [run.result() for run in runs[kind, model]]), flush=True)
    print(f"{time.perf_counter() - began:.0f} s, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")


if __name__ == "__main__":
    main()
