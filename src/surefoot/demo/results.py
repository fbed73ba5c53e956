"""What came of the three runs, in tables and sentences. Every figure is one that was just measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from surefoot.demo.cost import Cost
    from surefoot.demo.runs import DemoRun

_DONE = {
    "none": "seen, left alone",
    "skip": "step skipped",
    "back_off": "step skipped, rate cut",
    "roll_back": "back to a good state",
    "reset_moments": "optimizer state cleared",
    "take_back": "return taken back",
    "halt": "halted",
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    name: str
    steps: range
    watched: int
    """How many steps from its first one an incident still belongs to it."""

    def incidents(self, run: DemoRun) -> list[dict[str, Any]]:
        """What the run's guard said about it."""
        first = self.steps.start
        return [each for each in run.results["incidents"] if first <= each["step"] < first + self.watched]


def faults_of(steps: int) -> list[Fault]:
    """The faults of a run of so many steps, in the order in which they come."""
    from surefoot.zoo.demo.train import Faults

    faults = Faults.spread_over(steps)
    return [
        Fault("corrupt batch: one byte, repeated", _one(faults.corrupt_batch), 1),
        # Damage by a rate is known by the losses that follow: the guard waits for ten of them before it goes back.
        Fault("typo: 100 × the learning rate", faults.wrong_rate, len(faults.wrong_rate) + 20),
        Fault("fp16 overflow in the logits", _one(faults.overflow), 1),
        Fault("gradient of 0/0", _one(faults.nan_gradient), 1),
    ]


def _one(step: int) -> range:
    return range(step, step + 1)


def outcome_table(runs: list[DemoRun], faults: list[Fault], cost: Cost) -> Table:
    """A row per run."""
    table = _table("run", "faults", "validation loss", "caught", "what was done", "a step")
    clean, bare, guarded = runs
    caught = sum(bool(fault.incidents(guarded)) for fault in faults)
    plain = f"{cost.bare_ms:.1f} ms"
    table.add_row(clean.name, "none", _loss(clean), "", "", plain)
    table.add_row(bare.name, str(len(faults)), _loss(bare), "", "every step applied", plain)
    table.add_row(
        guarded.name,
        str(len(faults)),
        _loss(guarded),
        f"{caught} of {len(faults)}",
        _actions(guarded),
        f"{cost.guarded_ms:.1f} ms ({cost.ratio - 1:+.1%})",
    )
    return table


def _table(*heads: str) -> Table:
    return Table(*heads, box=SIMPLE_HEAD, pad_edge=False)


def _loss(run: DemoRun) -> str:
    return f"{run.results['validation']:.3f}"


def _actions(run: DemoRun) -> str:
    actions = [each["action"] for each in run.results["incidents"]]
    skips, returns = sum(each in ("skip", "back_off") for each in actions), actions.count("roll_back")
    parts = [f"{skips} step{'s' * (skips != 1)} skipped", f"{returns} return{'s' * (returns != 1)}"]
    return ", ".join(parts)


def fault_table(runs: list[DemoRun], faults: list[Fault]) -> Table:
    """A row per fault: what it did to the bare run, and what the guarded one did about it."""
    table = _table("", "fault", "step", "bare", "guarded")
    _, bare, guarded = runs
    for number, fault in enumerate(faults, 1):
        where = str(fault.steps.start) + (f"-{fault.steps[-1]}" if len(fault.steps) > 1 else "")
        done = [_DONE.get(each["action"], each["action"]) for each in fault.incidents(guarded)]
        table.add_row(str(number), fault.name, where, harm(bare, fault), ", ".join(done) or "not noticed")
    return table


def harm(run: DemoRun, fault: Fault) -> str:
    """What a fault did to the loss of an unprotected run."""
    losses: list[float] = run.results["losses"]
    before, after = losses[fault.steps.start - 1], losses[fault.steps.start : fault.steps.start + fault.watched + 1]
    if not math.isfinite(before):
        return "(lost already)"
    if not all(map(math.isfinite, after)):
        return "NaN, for good" if not math.isfinite(losses[-1]) else "NaN"
    return f"loss {before:.1f} → {max(after):.1f}"


def verdict(runs: list[DemoRun]) -> str:
    """One sentence about how they ended."""
    clean, bare, guarded = (run.results["validation"] for run in runs)
    return f"The bare run ends {_beside(bare, clean)}; the guarded one {_beside(guarded, clean)}."


def _beside(loss: float, clean: float) -> str:
    if not math.isfinite(loss):
        return "in NaN"
    return f"{abs(loss - clean):.3f} {'above' if loss > clean else 'below'} the clean one"


def diagnosis(run: DemoRun) -> str:
    """What `surefoot run` said at the end of it."""
    first = next((number for number, line in enumerate(run.said) if line.startswith("surefoot: ")), 0)
    return "\n".join(run.said[first:])
