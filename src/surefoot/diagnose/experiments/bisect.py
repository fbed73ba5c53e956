"""From a script to the change that cures it: baseline, repetition, experiments, within one budget of time.

The baseline is run first, and may take a third of the budget. If it does not fail, that is the answer. If it does, it
is run once more with nothing changed: a failure that does not come again cannot be cured by experiment, only by luck.
Then the changes, cheap to invasive, as many at a time as there are jobs. When the time is over, what runs is ended.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from surefoot.diagnose.engine import diagnose, load
from surefoot.diagnose.experiments.causes import FIXES, speaks_for, weigh
from surefoot.diagnose.experiments.children import Child, Children, Subject
from surefoot.diagnose.experiments.judge import Reading, compare, is_numeric, read
from surefoot.diagnose.experiments.plan import Change, in_turn, nothing_to_change, order_for
from surefoot.diagnose.experiments.probes import tells
from surefoot.diagnose.experiments.results import Report, Row, sentence, title_of
from surefoot.diagnose.run import Run
from surefoot.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from surefoot.diagnose.findings import Diagnosis

BASELINE_SHARE = 1 / 3
"""Of the budget, for the first run."""
LEAST_SECONDS = 20.0
"""What an experiment may take in any case, if the budget has it."""


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
    with Children(subject, out, threads=max(1, _cores() // jobs)) as children:
        work = _Work(children, changes, time.monotonic(), budget_s, jobs, tell)
        report = work.report(work.answer())
    report.script, report.budget_s, report.jobs = subject.target, budget_s, jobs
    report.seconds = time.monotonic() - work.began
    report.write(out)
    return report


class _Work:
    """The state of one command while it goes on."""

    def __init__(
        self,
        children: Children,
        changes: list[Change],
        began: float,
        budget_s: float,
        jobs: int,
        tell: Callable[[str, str], None],
    ) -> None:
        self.children, self.changes, self.jobs, self.tell = children, changes, jobs, tell
        self.began, self.budget_s, self.deadline = began, budget_s, began + budget_s
        self.rows: list[Row] = []
        self.diagnosis: Diagnosis | None = None
        self.baseline: Reading | None = None
        self.baseline_facts: dict[str, Any] = {}
        self.baseline_seconds = 0.0
        self.cut_short = False

    def answer(self) -> str:
        """Run everything; the answer in one word, with the sentence where it is not about cures."""
        trouble = self.run_baseline()
        if trouble:
            return trouble
        assert self.baseline is not None
        if not self.baseline.fails:
            return ""
        flaky = self.run_experiments()
        return (
            "the failure does not come again when nothing is changed: no experiment can tell a cure." if flaky else ""
        )

    def run_baseline(self) -> str:
        """The script as it is. What stands in the way of experiments, if anything does."""
        self.tell("baseline", "")
        seconds = self.budget_s * BASELINE_SHARE
        child = self.children.start("baseline", {"change": None, "seconds": seconds})
        self.children.wait(until=min(self.deadline, time.monotonic() + 2 * seconds))
        facts, run_facts = _baseline_facts(child)
        self.diagnosis = diagnose(facts, run_facts)
        reading = read(facts, run_facts, self.diagnosis.verdict)
        reading = _slow_if_named(reading, self.diagnosis)
        self.baseline, self.baseline_facts, self.baseline_seconds = reading, facts, child.seconds
        self.cut_short = facts["experiment"]["ended"] == "time" or run_facts.get("exit_code") is None
        row = Row("baseline", "baseline", "baseline", "fails" if reading.fails else "healthy", reading.words, reading)
        row.seconds = child.seconds
        self.rows.append(row)
        self.tell("baseline", reading.words)
        if reading.outcome == "crashed" and not is_numeric(reading.crash):
            return f"the script ends with {reading.crash}, which no change of the training cures."
        return ""

    def run_experiments(self) -> bool:
        """The repetition and the changes. Whether the failure turned out not to come again."""
        assert self.baseline is not None
        run = Run(self.baseline_facts, {})
        waiting: list[Change | None] = [None]
        for held in in_turn(self.changes, self._likely_fixes()):
            nothing = nothing_to_change(held, run, self.baseline)
            if nothing:
                self.rows.append(Row(held.name, held.title, held.kind, "does not apply", nothing))
            else:
                waiting.append(held)
        started: dict[str, Change | None] = {}
        flaky = False
        while waiting or self.children.running:
            while waiting and len(self.children.running) < self.jobs and time.monotonic() < self.deadline and not flaky:
                change = waiting.pop(0)
                name = change.name if change else "repeat"
                self.tell(name, "")
                self.children.start(name, self._order(change))
                started[name] = change
            child = self.children.wait(until=self.deadline)
            if child is None:
                break
            row = self._judge(child, started[child.name])
            self.rows.append(row)
            self.tell(child.name, f"{row.verdict}: {row.why}" if row.why else row.verdict)
            flaky = flaky or (child.name == "repeat" and row.verdict == "healthy")
        why = "the failure does not come again" if flaky else "budget"
        for change in waiting:
            name = change.name if change else "repeat"
            self.rows.append(Row(name, title_of(name), change.kind if change else "baseline", "not run", why))
        if flaky:
            for row in self.rows:
                if row.verdict == "cures":
                    row.verdict, row.why = "cannot tell", "nor did the unchanged script fail again"
        return flaky

    def _likely_fixes(self) -> dict[str, str]:
        """The changes that would fix the first finding that any change would fix."""
        findings = self.diagnosis.findings if self.diagnosis is not None else ()
        return next((FIXES[f.cause] for f in findings if f.severity != "info" and f.cause in FIXES), {})

    def _order(self, change: Change | None) -> dict[str, Any]:
        assert self.baseline is not None
        left = self.deadline - time.monotonic()
        order = order_for(change, self.baseline, min(left, max(LEAST_SECONDS, 5 * self.baseline_seconds)))
        if self.cut_short and "steps" not in order:
            order["steps"] = self.baseline.steps
        return order

    def _judge(self, child: Child, change: Change | None) -> Row:
        assert self.baseline is not None
        assert self.diagnosis is not None
        kind = change.kind if change else "baseline"
        row = Row(child.name, title_of(child.name), kind, "not run", "budget", seconds=child.seconds)
        try:
            facts, run_facts = _facts(child)
        except UsageError:
            if time.monotonic() < self.deadline:
                row.verdict, row.why = "cannot tell", f"left no facts: see {child.folder / 'output.txt'}"
            return row
        told = facts.get("experiment", {})
        if run_facts.get("exit_code") is None and not told.get("ended"):
            row.why = "stopped: budget"  # killed on its way; what it had written by then proves nothing
            return row
        row.notes = [*told.get("notes", [])]
        if child.name == "other-seed" and not told.get("acted"):
            row.notes.append("the script sets no seed of its own")
        row.reading = read(facts, run_facts, "broken")
        if change is None:
            fails = row.reading.fails or self.baseline.outcome == "slow"
            row.verdict, row.why = ("fails" if fails else "healthy"), row.reading.words
            return row
        if told.get("problem"):
            row.verdict, row.why, row.reading = "does not apply", f"could not be made: {told['problem']}", None
        elif not told.get("acted") and change.name != "other-seed":
            row.verdict, row.why, row.reading = "does not apply", _NOTHING.get(change.name, "nothing to change"), None
        elif change.name == "other-batches" and _same_data(self.baseline_facts, facts):
            row.verdict, row.why, row.reading = "does not apply", "the batches stay the same", None
        elif change.kind == "probe":
            row.verdict, row.why = "tells", tells(change.name, self.baseline, row.reading)
        else:
            row.verdict, row.why = compare(self.baseline, row.reading)
        return row

    def report(self, trouble: str) -> Report:
        """The rows in the order of the plan, the findings weighed, the sentence."""
        assert self.baseline is not None
        assert self.diagnosis is not None
        order = ["baseline", "repeat", *(change.name for change in self.changes)]
        rows = sorted(self.rows, key=lambda row: order.index(row.name))
        cures = [row.name for row in rows if row.verdict == "cures"]
        failures = [row.name for row in rows if row.verdict == "does not"]
        if trouble:
            answer = "undecided" if self.baseline.outcome == "crashed" else "flaky"
            return Report("", answer, trouble, rows, self.diagnosis)  # type: ignore[arg-type]
        if not self.baseline.fails:
            return Report("", "healthy", _healthy(self.baseline, self.diagnosis, self.cut_short), rows, self.diagnosis)
        unmoved = [
            row.name
            for row in rows
            if row.verdict == "does not"
            and row.reading is not None
            and row.reading.failed_at == self.baseline.failed_at
        ]
        weighed = weigh(self.diagnosis, cures, failures, unmoved)
        confirmed = [f.cause for f in weighed.findings if f.evidence.get("experiments", {}).get("confirmed")]
        tried = any(row.verdict in ("cures", "does not") for row in rows)
        report = Report("", "cured" if cures else "not cured" if tried else "undecided", sentence(rows), rows, weighed)
        report.confirms, report.speaks_for = confirmed, speaks_for(cures, unmoved)
        return report


_NOTHING = {
    "clip": "no gradient norm is above 1.0",
    "fp32": "no autocast and no half precision in the script",
    "bf16": "no fp16 in the script",
    "skip-batch": "no step had to be skipped",
    "reset-moments": "there were no moments to reset",
    "eps": "the optimizer has no eps",
    "tiny-batch": "rows are drawn in a way that is out of reach",
    "synthetic-inputs": "the model is given no floating-point inputs",
    "shuffled-labels": "the loss is not one of torch's own functions",
}


def _facts(child: Child) -> tuple[dict[str, Any], dict[str, Any]]:
    facts, run_facts = load(child.folder)
    return facts, run_facts


def _baseline_facts(child: Child) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the first run left. A script that cannot be experimented with is wrong use, with a way out."""
    log = child.folder / "output.txt"
    try:
        facts, run_facts = _facts(child)
    except UsageError:
        raise UsageError(
            f"the script showed nothing in {child.seconds:.0f} s: see {log}, or give it a larger --budget."
        ) from None
    told, crash = facts.get("experiment"), facts.get("crash")
    if told is None:
        raise UsageError(
            f"the script ended (exit code {run_facts.get('exit_code')}) without importing torch: see {log}."
        )
    if told.get("refused"):
        raise UsageError(
            f"the script writes to {told['refused']}, which is outside of the working directory and was there before; "
            "experiments would change it. Have the script write inside the working directory."
        )
    if not facts.get("backwards"):
        why = f"it ended with {crash.get('type')}" if crash else f"exit code {run_facts.get('exit_code')}"
        raise UsageError(f"the script never called backward ({why}): see {log}.")
    return facts, run_facts


def _slow_if_named(reading: Reading, diagnosis: Diagnosis) -> Reading:
    """A run that learns, but whose diagnosis names a cause that a change could cure, may learn much better."""
    from dataclasses import replace

    named = [finding for finding in diagnosis.findings if finding.severity != "info"]
    if reading.outcome == "learned" and named and named[0].cause in FIXES:
        return replace(reading, outcome="slow", words=f"{reading.words}, though {named[0].cause}")
    return reading


def _same_data(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs were trained on the same batches, as far as their prints show."""
    prints = [[note.get("x") for note in facts.get("stream", {}).get("notes", [])[:40]] for facts in (one, other)]
    length = min(len(held) for held in prints)
    return length >= 5 and prints[0][:length] == prints[1][:length]


def _healthy(baseline: Reading, diagnosis: Diagnosis, cut_short: bool) -> str:
    words = f"nothing needs curing: {baseline.steps} steps, the loss {baseline.words}."
    if baseline.outcome == "too short":
        words = f"nothing to judge: {baseline.words}."
    elif diagnosis.verdict != "healthy":
        named = next(finding for finding in diagnosis.findings if finding.severity != "info")
        words = (
            f"the loss does not fail ({baseline.words}), so there is nothing to cure by experiment; "
            f"the diagnosis names {named.cause}."
        )
    return words + (" It was ended when its share of the budget was over." if cut_short else "")
