"""From a script to the change that cures it: baseline, repetition, experiments, within one budget of time.

The baseline is run first, and may take a third of the budget. If it does not fail, that is the answer. If it does, it
is run once more with nothing changed: a failure that does not come again cannot be cured by experiment, only by luck.
Then the changes, as many at a time as there are jobs. When the time is over, what runs is ended.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from surefoot.diagnose.engine import load
from surefoot.diagnose.experiments.baseline import Baseline, run_baseline
from surefoot.diagnose.experiments.causes import speaks_for, weigh
from surefoot.diagnose.experiments.children import Child, Children, Subject
from surefoot.diagnose.experiments.judge import compare, read
from surefoot.diagnose.experiments.plan import Change, in_turn, nothing_to_change, order_for
from surefoot.diagnose.experiments.probes import tells
from surefoot.diagnose.experiments.results import Report, Row, sentence
from surefoot.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from surefoot.diagnose.experiments.results import Answer, Verdict

BASELINE_SHARE = 1 / 3
"""Of the budget, for the first run."""
LEAST_SECONDS = 20.0
"""What an experiment may take in any case, if the budget has it."""
REPEAT = Change("repeat", "repeat", "baseline")
"""Nothing changed."""
FLAKY = "the failure does not come again"


def default_jobs() -> int:
    """Half of the cores; one where there is a GPU, whose memory the runs would have to share."""
    if os.path.exists("/proc/driver/nvidia") or os.path.exists("/dev/nvidia0"):
        return 1
    return max(1, _cores() // 2)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bisect(
    subject: Subject,
    out: Path,
    changes: list[Change],
    budget_s: float,
    jobs: int,
    tell: Callable[[str, str], None] = lambda name, words: None,
) -> Report:
    """Run the experiments and judge them. `tell(name, words)` hears of each run's beginning (no words) and end."""
    began = time.monotonic()
    with Children(subject, out, threads=max(1, _cores() // jobs)) as children:
        tell("baseline", "")
        baseline = run_baseline(children, budget_s * BASELINE_SHARE, began + budget_s)
        tell("baseline", baseline.reading.words)
        rows = [_row_of(baseline)]
        if not baseline.why_not:
            rows += _Experiments(children, baseline, began + budget_s, jobs, tell).run(changes)
    report = _conclude(baseline, rows)
    report.script, report.budget_s, report.jobs = subject.target, budget_s, jobs
    report.seconds = time.monotonic() - began
    report.write(out)
    return report


def _row_of(baseline: Baseline) -> Row:
    reading = baseline.reading
    verdict: Verdict = "fails" if reading.fails else "healthy"
    return Row("baseline", "baseline", "baseline", verdict, reading.words, reading, baseline.seconds)


def _conclude(baseline: Baseline, rows: list[Row]) -> Report:
    """What the experiments say about the causes."""
    if baseline.why_not:
        answer: Answer = "undecided" if baseline.reading.fails else "healthy"
        return Report(answer, baseline.why_not, rows, baseline.diagnosis)
    if any(row.name == REPEAT.name and row.verdict == "healthy" for row in rows):
        words = f"{FLAKY} when nothing is changed: no experiment can tell a cure."
        return Report("flaky", words, rows, baseline.diagnosis)
    cures = [row.name for row in rows if row.verdict == "cures"]
    failed = {row.name: row.reading.failed_at for row in rows if row.verdict == "does not" and row.reading}
    exact = baseline.reading.outcome != "slow"  # how fast is a matter of degree, and refutes nothing
    unmoved = [name for name, step in failed.items() if exact and step == baseline.reading.failed_at]
    found = weigh(baseline.diagnosis, cures, list(failed), unmoved)
    report = Report("cured" if cures else "not cured" if failed else "undecided", sentence(rows), rows, found)
    report.confirms = [f.cause for f in found.findings if f.evidence.get("experiments", {}).get("confirmed")]
    report.speaks_for = speaks_for(cures, unmoved)
    return report


class _Experiments:
    """The repetition and the changes, run side by side and judged as they end."""

    def __init__(
        self, children: Children, baseline: Baseline, deadline: float, jobs: int, tell: Callable[[str, str], None]
    ) -> None:
        self.children, self.baseline, self.deadline = children, baseline, deadline
        self.jobs, self.tell = jobs, tell
        self.flaky = False

    def run(self, changes: list[Change]) -> list[Row]:
        """One row per change, in the order they were given; the repetition first."""
        rows: dict[str, Row] = {}
        waiting = [REPEAT]
        for change in in_turn(changes, self.baseline.likely_fixes):
            why = nothing_to_change(change, self.baseline.run, self.baseline.reading)
            if why:
                rows[change.name] = _row(change, "does not apply", why)
            else:
                waiting.append(change)
        started: dict[str, Change] = {}
        while waiting or self.children.running:
            while waiting and self._may_start():
                change = waiting.pop(0)
                started[change.name] = change
                self.tell(change.name, "")
                self.children.start(change.name, self._order(change))
            child = self.children.wait(until=self.deadline)
            if child is None:
                break
            row = rows[child.name] = self._judge(child, started[child.name])
            self.tell(child.name, f"{row.verdict}: {row.why}" if row.why else row.verdict)
            self.flaky = self.flaky or (child.name == REPEAT.name and row.verdict == "healthy")
        for change in waiting:
            rows[change.name] = _row(change, "not run", FLAKY if self.flaky else "budget")
        return [self._settled(rows[change.name]) for change in [REPEAT, *changes]]

    def _may_start(self) -> bool:
        return len(self.children.running) < self.jobs and time.monotonic() < self.deadline and not self.flaky

    def _settled(self, row: Row) -> Row:
        if self.flaky and row.verdict == "cures":
            row.verdict, row.why = "cannot tell", "nor did the unchanged script fail again"
        return row

    def _order(self, change: Change) -> dict[str, Any]:
        left = self.deadline - time.monotonic()
        seconds = min(left, max(LEAST_SECONDS, 5 * self.baseline.seconds))
        order = order_for(change if change is not REPEAT else None, self.baseline.reading, seconds)
        if self.baseline.cut_short and "steps" not in order:
            order["steps"] = self.baseline.reading.steps
        return order

    def _judge(self, child: Child, change: Change) -> Row:
        row = _row(change, "not run", "budget")
        row.seconds = child.seconds
        try:
            facts, run_facts = load(child.folder)
        except UsageError:
            if time.monotonic() < self.deadline:
                row.verdict, row.why = "cannot tell", f"left no facts: see {child.folder / 'output.txt'}"
            return row
        told = facts.get("experiment", {})
        if run_facts.get("exit_code") is None and not told.get("ended"):
            row.why = "stopped: budget"  # killed on its way; what it had written by then proves nothing
            return row
        nothing = self._nothing_changed(change, facts)
        if nothing:
            row.verdict, row.why = "does not apply", nothing
            return row
        row.notes = list(told.get("notes", []))
        if change.name == "other-seed" and not told.get("acted"):
            row.notes.append("the script sets no seed of its own")
        row.reading = read(facts, run_facts)
        if change is REPEAT:
            fails = row.reading.fails or self.baseline.reading.outcome == "slow"
            row.verdict, row.why = ("fails" if fails else "healthy"), row.reading.words
        elif change.kind == "probe":
            row.verdict, row.why = "tells", tells(change.name, self.baseline.reading, row.reading)
        else:
            row.verdict, row.why = compare(self.baseline.reading, row.reading)
        return row

    def _nothing_changed(self, change: Change, facts: dict[str, Any]) -> str:
        """Why the run was no other than the baseline; empty if it was."""
        told = facts.get("experiment", {})
        if told.get("problem"):
            return f"could not be made: {told['problem']}"
        if change.name in _NOTHING and not told.get("acted"):
            return _NOTHING[change.name]
        if change.name == "other-batches" and _same_data(self.baseline.facts, facts):
            return "the batches stay the same"
        return ""


_NOTHING = {
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
    "tiny-batch": "rows are drawn in a way that is out of reach",
    "synthetic-inputs": "the model is given no floating-point inputs",
    "shuffled-labels": "the loss is not one of torch's own functions",
}
"""Why a change never acted."""


def _row(change: Change, verdict: Verdict, why: str) -> Row:
    return Row(change.name, change.title, change.kind, verdict, why)


def _same_data(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs were trained on the same batches, as far as their prints show."""
    notes = [facts.get("stream", {}).get("notes", [])[:40] for facts in (one, other)]
    prints = [[(note.get("x"), note.get("y")) for note in held] for held in notes]
    length = min(len(held) for held in prints)
    known = sum(pair != (None, None) for pair in prints[0][:length])
    return known >= 5 and prints[0][:length] == prints[1][:length]
