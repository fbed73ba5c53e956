"""The results of the three runs, as tables and sentences. Every figure was measured in these runs."""

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
    "none": "detected, no action",
    "skip": "step skipped",
    "back_off": "step skipped, rate cut",
    "roll_back": "rolled back",
    "reset_moments": "optimizer state reset",
    "take_back": "rollback undone",
    "halt": "halted",
}


@dataclass(frozen=True)
class Fault:
    """One injected fault."""

    name: str
    steps: range
    watched: int
    """How many steps from the first one an incident is attributed to this fault."""

    def incidents(self, run: DemoRun) -> list[dict[str, Any]]:
        """The incidents of a run that belong to this fault."""
        first = self.steps.start
        return [each for each in run.results["incidents"] if first <= each["step"] < first + self.watched]


def faults_of(steps: int) -> list[Fault]:
    """The faults of a run with this many steps, in order."""
    from surefoot.zoo.demo.train import Faults

    faults = Faults.spread_over(steps)
    return [
        Fault("corrupt batch: one byte, repeated", _one(faults.corrupt_batch), 1),
        # A wrong rate is detected by the losses that follow it: the guard waits for ten of them before it rolls back.
        Fault("typo: 100 × the learning rate", faults.wrong_rate, len(faults.wrong_rate) + 20),
        Fault("fp16 overflow in the logits", _one(faults.overflow), 1),
        Fault("gradient of 0/0", _one(faults.nan_gradient), 1),
    ]


def _one(step: int) -> range:
    return range(step, step + 1)


def outcome_table(runs: list[DemoRun], faults: list[Fault], cost: Cost) -> Table:
    """A row per run."""
    table = _table("run", "faults", "validation loss", "detected", "actions", "time per step")
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
    parts = [f"{skips} step{'s' * (skips != 1)} skipped", f"{returns} rollback{'s' * (returns != 1)}"]
    return ", ".join(parts)


def fault_table(runs: list[DemoRun], faults: list[Fault]) -> Table:
    """A row per fault: its effect on the bare run, and the action of the guarded one."""
    table = _table("", "fault", "step", "bare", "guarded")
    _, bare, guarded = runs
    for number, fault in enumerate(faults, 1):
        where = str(fault.steps.start) + (f"-{fault.steps[-1]}" if len(fault.steps) > 1 else "")
        done = [_DONE.get(each["action"], each["action"]) for each in fault.incidents(guarded)]
        table.add_row(str(number), fault.name, where, harm(bare, fault), ", ".join(done) or "not detected")
    return table


def harm(run: DemoRun, fault: Fault) -> str:
    """The effect of a fault on the loss of an unprotected run."""
    losses: list[float] = run.results["losses"]
    before, after = losses[fault.steps.start - 1], losses[fault.steps.start : fault.steps.start + fault.watched + 1]
    if not math.isfinite(before):
        return "already NaN"
    if not all(map(math.isfinite, after)):
        return "NaN until the end" if not math.isfinite(losses[-1]) else "NaN"
    return f"loss {before:.1f} → {max(after):.1f}"


def verdict(runs: list[DemoRun]) -> str:
    """One sentence about the final losses."""
    clean, bare, guarded = (run.results["validation"] for run in runs)
    return f"The bare run ends {_beside(bare, clean)}; the guarded run {_beside(guarded, clean)}."


def _beside(loss: float, clean: float) -> str:
    if not math.isfinite(loss):
        return "in NaN"
    return f"{abs(loss - clean):.3f} {'above' if loss > clean else 'below'} the clean run"


def diagnosis(run: DemoRun) -> str:
    """What `surefoot run` printed at the end."""
    first = next((number for number, line in enumerate(run.output) if line.startswith("surefoot: ")), 0)
    return "\n".join(run.output[first:])
