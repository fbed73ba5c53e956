"""From an incident to the change that cures it: the captured step and later ones, run again with single changes.

As in `bisect`, the baseline comes first, then its repetition, then the changes, within one budget. A run begins at the
captured step, from the captured state (`replay.continued_run`), and is short, so `after_incident` judges it. Changes
that affect only the update are not tried if the step fails before anything is updated. `step_conclusion` combines the
results.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surefoot.core.formats import FINDINGS
from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.diagnose.terminal import printable
from surefoot.errors import UsageError
from surefoot.experiments.after_incident import (
    FOLLOW_STEPS,
    Level,
    compare_after_incident,
    level_before,
    losses_before,
    read_after_incident,
    recorded_by,
)
from surefoot.experiments.baseline import usable_facts
from surefoot.experiments.processes import Children, Subject
from surefoot.experiments.results import Report, Row
from surefoot.experiments.run_comparison import RunReading, crash_of, is_numeric
from surefoot.experiments.step_conclusion import (
    conclude,
    other_draws,
    verdict_of_draws,
    verdict_of_probe,
    verdict_of_rows,
)
from surefoot.experiments.trials import BASELINE_SHARE, LEAST_SECONDS, REPEAT, Trials, cores
from surefoot.record.incidents.reading import number

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.experiments.changes.run_order import RunOrder
    from surefoot.experiments.plan import Change
    from surefoot.record.facts import ExperimentFacts, RunDescription, RunFacts
    from surefoot.record.incidents.summary import IncidentFacts

LOOP = "surefoot.replay.target_loop"
MOST_STEPS = 200
_UPDATE_ONLY = ("lr-3", "lr-10", "warm-up", "clip", "reset-moments", "eps")
"""Changes that affect neither the forward nor the backward pass."""


@dataclass(frozen=True)
class CapturedIncident:
    """The incident, and what its runs are compared with."""

    folder: Path
    facts: IncidentFacts
    """The contents of its `incident.json`."""
    target: str | None = None

    @property
    def step(self) -> int:
        """The captured step."""
        return int(self.facts["step"])

    @property
    def level(self) -> Level | None:
        """The level of the loss before the step."""
        return level_before([loss for _, loss in losses_before(self.facts)])

    def order(self, change: str | None, seconds: float, follow: int = FOLLOW_STEPS) -> RunOrder:
        """The order that a run is given."""
        return {
            "change": change,
            "incident": str(self.folder.resolve()),
            "target": self.target,
            "follow": follow,
            "seconds": seconds,
        }


@dataclass(frozen=True)
class AppliedAsItWas:
    """The run with nothing changed."""

    captured: CapturedIncident
    reading: RunReading
    facts: RunFacts
    seconds: float

    @property
    def recorded(self) -> ExperimentFacts:
        """What the run recorded in its own process."""
        return recorded_by(self.facts)

    @property
    def why_not(self) -> str:
        """Why no experiment can cure it; empty if one might."""
        crash = self.reading.crash
        if self.reading.outcome == "crashed" and not is_numeric(crash):
            return f"the script ends with {crash}, which no change to the training can cure."
        return ""

    @property
    def fails_at_once(self) -> bool:
        """Whether the step fails before anything is updated."""
        return self.reading.outcome in ("non-finite", "crashed") and self.reading.failed_at == self.captured.step


def experiment_on(
    captured: CapturedIncident,
    subject: Subject,
    out: Path,
    changes: list[Change],
    budget_s: float,
    jobs: int,
    on_event: Callable[[str, str], None] = lambda name, words: None,
) -> Report:
    """Run the experiments and judge them.

    `on_event(name, words)` is called at the beginning (no words) and end of a run.
    """
    began = time.monotonic()
    if captured.target is not None:
        subject = replace(subject, target=LOOP, arguments=(captured.target,), is_module=True)
    with Children(subject, out, threads=max(1, cores() // jobs)) as children:
        on_event("baseline", "")
        baseline = _apply(captured, children, budget_s * BASELINE_SHARE, began + budget_s)
        on_event("baseline", baseline.reading.words)
        rows = [_row_of(baseline)]
        if baseline.reading.fails and not baseline.why_not:
            trials = Trials(children, _AfterIncident(baseline), began + budget_s, jobs, on_event)
            rows += trials.run(changes, changes)
    report = conclude(baseline, rows, findings_near(captured), subject.target if captured.target is None else "")
    report.script, report.budget_s, report.jobs = captured.target or subject.target, budget_s, jobs
    report.incident, report.seconds = captured.folder.name, time.monotonic() - began
    report.write(out)
    return report


def _apply(captured: CapturedIncident, children: Children, seconds: float, deadline: float) -> AppliedAsItWas:
    child = children.start("baseline", captured.order(None, seconds))
    children.wait(until=min(deadline, time.monotonic() + 2 * seconds))
    facts, description = usable_facts(child)
    recorded, log = recorded_by(facts), child.folder / "output.txt"
    reading = read_after_incident(facts, description, captured.step, captured.level)
    if not recorded.trail and not recorded.open:
        crash = f" ({reading.crash})" if reading.crash else ""
        raise UsageError(
            f"the script completed no step with the captured state{crash}: it does not train a "
            f"model with the names and shapes of the captured weights, or it drew no batch. See {log}."
        )
    return AppliedAsItWas(captured, reading, facts, child.seconds)


def _row_of(baseline: AppliedAsItWas) -> Row:
    reading = baseline.reading
    before = losses_before(baseline.captured.facts)
    shown = replace(reading, losses=[*before, *reading.losses])  # the chart begins before the step
    return Row(
        "baseline", "baseline", "baseline", "fails" if reading.fails else "healthy", reading.words, shown,
        baseline.seconds, list(baseline.recorded.notes),
    )  # fmt: skip


class _AfterIncident:
    """Asks whether each changed run continues normally where the baseline failed."""

    def __init__(self, baseline: AppliedAsItWas) -> None:
        self.baseline, self.captured = baseline, baseline.captured
        failed = baseline.reading.failed_at
        self._optimizers = baseline.facts.optimizers
        self.failed_after = 0 if failed is None else failed - self.captured.step

    def nothing_to_change(self, change: Change) -> str | None:
        baseline, level = self.baseline, self.captured.level
        if baseline.recorded.state:
            return "weights were not finite before the step"
        first = next(iter(baseline.recorded.trail or []), None)
        if baseline.fails_at_once:
            if change.name in _UPDATE_ONLY:
                return "the step fails before anything is updated"
            if change.name == "skip-batch" and first is not None and not first.applied:
                return "the loss scaler already skips the step"
        elif change.name == "tiny-batch" and (level is None or first is None or number(first.loss) <= level.bar):
            return "the loss of the step is not unusually high, so no single row can be responsible"
        if change.name in ("synthetic-inputs", "shuffled-labels") and baseline.reading.outcome == "risen":
            return "the expected loss is not known in this case"
        if change.name == "smaller-model":
            return "the captured weights were trained with all blocks"
        seen = baseline.recorded.seen
        if change.name == "reset-moments" and seen is not None and not seen.has_state:
            return "the optimizer keeps no moments"
        if change.name in ("clip", "skip-batch") and any(held.series.closure for held in self._optimizers):
            return "the optimizer evaluates the loss itself, so its gradients cannot be changed"
        if change.name == "eps" and not self._has_eps():
            return "the optimizer has no eps"
        if change.name == "deterministic" and self.captured.facts["hardware"].get("device") == "cpu":
            return "everything runs on the CPU"
        return None

    def _has_eps(self) -> bool:
        return any(isinstance(group.eps, float) for held in self._optimizers for group in held.settings)

    def order(self, change: Change, seconds_left: float) -> RunOrder:
        seconds = min(seconds_left, max(LEAST_SECONDS, 5 * self.baseline.seconds))
        name = None if change is REPEAT else change.name
        order = self.captured.order(name, seconds, self._follow(change))
        if name == "other-seed":
            order["draws"] = self.baseline.fails_at_once  # a later failure takes a run, not a step
        if name == "tiny-batch":
            level = self.captured.level
            order["bar"] = None if self.baseline.fails_at_once or level is None else level.bar
        return {**order, "skip_steps": [0], "reset_at": 0, "warmup_steps": FOLLOW_STEPS}

    def _follow(self, change: Change) -> int:
        """Enough steps to get as far as the baseline did before it failed."""
        if not self.failed_after:
            return FOLLOW_STEPS
        further = math.ceil(1.5 * change.slower * self.failed_after) + FOLLOW_STEPS // 2
        return min(MOST_STEPS, max(FOLLOW_STEPS, further + (FOLLOW_STEPS if change.name == "warm-up" else 0)))

    def judge(self, row: Row, change: Change, facts: RunFacts, description: RunDescription) -> None:
        recorded = recorded_by(facts)
        row.draws = other_draws(recorded.rows, crash_of(facts, description))
        if change.name == "other-seed" and row.draws is not None and recorded.rows is not None:
            row.verdict, row.why = verdict_of_draws(row.draws, recorded.rows.draws.random)
            return
        if change.name == "tiny-batch":
            row.title = "rows of the batch"
            row.verdict, row.why = verdict_of_rows(recorded.rows)
            return
        # The expected loss on noise is not known: only non-finite values and errors count there.
        level = None if change.name in ("synthetic-inputs", "shuffled-labels") else self.captured.level
        row.reading = read_after_incident(facts, description, self.captured.step, level)
        first = next(iter(recorded.trail or []), None)
        if change is REPEAT:
            row.verdict, row.why = ("fails" if row.reading.fails else "healthy"), row.reading.words
        elif change.name == "other-batches" and first is not None and first.captured_rows:
            row.verdict, row.why, row.reading = "does not apply", "the batches stay the same", None
        elif change.kind == "probe":
            row.verdict, row.why = verdict_of_probe(change.name, row.reading)
        else:
            row.verdict, row.why = compare_after_incident(self.baseline.reading, row.reading)


def findings_near(captured: CapturedIncident) -> Diagnosis:
    """The diagnosis of the run that the incident belongs to, if it is in the same folder; otherwise an empty one."""
    nothing = Diagnosis("broken", captured.step, ())
    try:
        text = (captured.folder.resolve().parents[1] / "findings.json").read_text(encoding="utf-8")
        recorded = json.loads(text, object_hook=_printable)  # they are shown, and may be a stranger's
        recorded = FINDINGS.read(recorded, "findings.json", ValueError, unmarked=1)
        names = Finding.__dataclass_fields__
        findings = [{key: value for key, value in each.items() if key in names} for each in recorded["findings"]]
        made = (Finding(**each | {"where": tuple(each["where"]), "fixes": tuple(each["fixes"])}) for each in findings)
        return Diagnosis(recorded["verdict"], int(recorded["steps"]), tuple(made))
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return nothing


def _printable(held: Mapping[str, object]) -> Mapping[str, object]:
    def shown(item: Any) -> Any:
        if isinstance(item, list):
            return [shown(each) for each in item]
        return printable(item) if isinstance(item, str) else item

    return {printable(key): shown(item) for key, item in held.items()}
