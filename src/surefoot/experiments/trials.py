"""Runs with single changes, in parallel, within a deadline: shared by all commands with experiments.

The unchanged repetition runs first, then the changes, as many at a time as there are jobs. When the time is up, the
running ones are ended and the rest is listed as not run. If the repetition does not fail, nothing more is started,
because no experiment could distinguish a cure from chance. A `Question` decides on the orders of the runs and judges
them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from surefoot.diagnose.engine import load
from surefoot.errors import UsageError
from surefoot.experiments.plan import Change
from surefoot.experiments.results import Row, Verdict
from surefoot.record.facts import ExperimentFacts, RunDescription, RunFacts

if TYPE_CHECKING:
    from surefoot.experiments.changes.run_order import RunOrder
    from surefoot.experiments.processes import Child, Children

BASELINE_SHARE = 1 / 3
"""The share of the budget for the first run."""
LEAST_SECONDS = 20.0
"""The minimum time of an experiment, if the budget allows it."""
REPEAT = Change("repeat", "repeat", "baseline")
"""The unchanged script once more."""
FLAKY = "the failure does not occur again"
NOTHING = {
    "lr-3": "no optimizer has a learning rate",
    "lr-10": "no optimizer has a learning rate",
    "warm-up": "no optimizer has a learning rate",
    "clip": "no gradient norm is above 1.0",
    "fp32": "no autocast and no half precision in the script",
    "bf16": "no fp16 in the script",
    "other-batches": "no optimizer was made",
    "skip-batch": "no step had to be skipped",
    "reset-moments": "there were no moments to reset",
    "eps": "the optimizer has no eps",
    "tiny-batch": "rows are drawn in a way that surefoot cannot change",
    "synthetic-inputs": "the model is given no floating-point inputs",
    "shuffled-labels": "the loss is not one of torch's own functions",
}
"""Why a change never took effect."""


def default_jobs() -> int:
    """Half of the cores; one if there is a GPU, because the runs would share its memory."""
    if os.path.exists("/proc/driver/nvidia") or os.path.exists("/dev/nvidia0"):
        return 1
    return max(1, cores() // 2)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Question(Protocol):
    """What is asked of the runs."""

    def nothing_to_change(self, change: Change) -> str | None:
        """Why a change would have no effect, as far as the baseline shows; it is then not run."""

    def order(self, change: Change, seconds_left: float) -> RunOrder:
        """The order for a run."""

    def judge(self, row: Row, change: Change, facts: RunFacts, description: RunDescription) -> None:
        """Store the verdict in the row of a completed run."""


class Trials:
    """The repetition and the changes."""

    def __init__(
        self, children: Children, question: Question, deadline: float, jobs: int, on_event: Callable[[str, str], None]
    ) -> None:
        self.children, self.question, self.deadline = children, question, deadline
        self.jobs, self.on_event = jobs, on_event
        self.flaky = False

    def run(self, changes: list[Change], turns: list[Change]) -> list[Row]:
        """One row per change in the order of `changes`, the repetition first. They are run in the order of `turns`."""
        rows: dict[str, Row] = {}
        waiting = [REPEAT]
        for change in turns:
            why = self.question.nothing_to_change(change)
            if why:
                rows[change.name] = _row(change, "does not apply", why)
            else:
                waiting.append(change)
        started: dict[str, Change] = {}
        while waiting or self.children.running:
            while waiting and self._may_start():
                change = waiting.pop(0)
                started[change.name] = change
                self.on_event(change.name, "")
                order = self.question.order(change, self.deadline - time.monotonic())
                self.children.start(change.name, order)
            child = self.children.wait(until=self.deadline)
            if child is None:
                break
            row = rows[child.name] = self._judged(child, started[child.name])
            self.on_event(child.name, f"{row.verdict}: {row.why}" if row.why else row.verdict)
            self.flaky = self.flaky or (child.name == REPEAT.name and row.verdict == "healthy")
        for change in waiting:
            rows[change.name] = _row(change, "not run", FLAKY if self.flaky else "budget")
        return [self._settled(rows[change.name]) for change in [REPEAT, *changes]]

    def _may_start(self) -> bool:
        return len(self.children.running) < self.jobs and time.monotonic() < self.deadline and not self.flaky

    def _settled(self, row: Row) -> Row:
        if self.flaky and row.verdict == "cures":
            row.verdict, row.why = "cannot tell", "the unchanged script did not fail again either"
        return row

    def _judged(self, child: Child, change: Change) -> Row:
        row = _row(change, "not run", "budget")
        row.seconds = child.seconds
        try:
            facts, description = load(child.folder)
        except UsageError:
            if time.monotonic() < self.deadline:
                row.verdict, row.why = "cannot tell", f"recorded nothing: see {child.folder / 'output.txt'}"
            return row
        recorded = facts.experiment or ExperimentFacts()
        if description.exit_code is None and not recorded.ended:
            row.why = "stopped: budget"  # killed before its end: what it had written by then is no evidence
        elif recorded.problem:
            row.verdict, row.why = "does not apply", f"could not be applied: {recorded.problem}"
        elif recorded.why_not:
            row.verdict, row.why = "does not apply", recorded.why_not
        elif change.name in NOTHING and not recorded.acted:
            row.verdict, row.why = "does not apply", NOTHING[change.name]
        else:
            row.notes = list(recorded.notes)
            self.question.judge(row, change, facts, description)
        return row


def _row(change: Change, verdict: Verdict, why: str) -> Row:
    return Row(change.name, change.title, change.kind, verdict, why)
