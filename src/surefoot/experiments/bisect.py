"""From a script to the change that cures it: baseline, repetition, experiments, within one time budget.

The baseline runs first and may use a third of the budget. If it does not fail, there is nothing to do. If it fails, it
is run once more unchanged: if the failure does not occur again, an experiment cannot distinguish a cure from chance.
Then the changes run, as many at a time as there are jobs. When the budget is used up, the remaining runs are ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from surefoot.experiments.baseline import Baseline, run_baseline
from surefoot.experiments.change_causes import causes_of_cures, confirm, weigh
from surefoot.experiments.plan import Change, in_turn, nothing_to_change, order_for
from surefoot.experiments.processes import Children, Subject
from surefoot.experiments.results import Answer, Report, Row, Verdict, sentence
from surefoot.experiments.run_comparison import compare, not_learned, probe_text, read
from surefoot.experiments.trials import BASELINE_SHARE, FLAKY, LEAST_SECONDS, REPEAT, Trials, cores

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.diagnose.findings import Diagnosis
    from surefoot.experiments.changes.run_order import RunOrder
    from surefoot.record.facts import RunDescription, RunFacts


def bisect(
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
    with Children(subject, out, threads=max(1, cores() // jobs)) as children:
        on_event("baseline", "")
        baseline = run_baseline(children, budget_s * BASELINE_SHARE, began + budget_s)
        on_event("baseline", baseline.reading.words)
        rows = [_row_of(baseline)]
        if not baseline.why_not:
            trials = Trials(children, _Bisection(baseline), began + budget_s, jobs, on_event)
            rows += trials.run(changes, in_turn(changes, baseline.likely_fixes))
    report = _conclude(baseline, rows)
    report.script, report.budget_s, report.jobs = subject.target, budget_s, jobs
    report.seconds = time.monotonic() - began
    report.write(out)
    return report


def _row_of(baseline: Baseline) -> Row:
    reading = baseline.reading
    verdict: Verdict = "fails" if reading.fails else "cannot tell" if reading.outcome == "too short" else "healthy"
    return Row("baseline", "baseline", "baseline", verdict, reading.words, reading, baseline.seconds)


def _conclude(baseline: Baseline, rows: list[Row]) -> Report:
    """Conclude from all experiments."""
    if baseline.why_not:
        unjudged = baseline.reading.fails or baseline.reading.outcome == "too short"
        answer: Answer = "undecided" if unjudged else "healthy"
        return Report(answer, baseline.why_not, rows, baseline.diagnosis)
    if any(row.name == REPEAT.name and row.verdict == "healthy" for row in rows):
        text = f"{FLAKY} when nothing is changed, so no experiment can show a cure."
        return Report("flaky", text, rows, baseline.diagnosis)
    cures = [row.name for row in rows if row.verdict == "cures"]
    failed = {row.name: row.reading.failed_at for row in rows if row.verdict == "does not" and row.reading}
    exact = baseline.reading.outcome != "slow"  # a difference in speed refutes no cause
    unmoved = [name for name, step in failed.items() if exact and step == baseline.reading.failed_at]
    found = weigh(baseline.diagnosis, cures, list(failed), unmoved)
    scale = _scale(rows, cures, found)
    if scale:
        found = confirm(found, "data.unscaled-input", "synthetic-inputs")
    report = Report("cured" if cures else "not cured" if failed else "undecided", sentence(rows), rows, found)
    report.confirms = [f.cause for f in found.findings if f.evidence.get("experiments", {}).get("confirmed")]
    report.speaks_for = causes_of_cures(cures, unmoved)
    report.conclusions = [*scale, *_chance(rows, report.confirms)]
    return report


def _scale(rows: list[Row], cures: list[str], found: Diagnosis) -> list[str]:
    """Whether only other inputs help. Corrects the result for a few rows if the run on noise contradicts it."""
    probes = {row.name: row for row in rows if row.verdict == "tells" and row.reading is not None}
    noise, few = probes.get("synthetic-inputs"), probes.get("tiny-batch")
    if noise is None or noise.reading is None:
        return []
    if few is not None and few.reading is not None and not few.reading.fails:
        few.why = not_learned(few.reading, noise.reading) or few.why
    broken = any(each.cause == "data.nonfinite-input" and each.severity != "info" for each in found.findings)
    if cures or broken or noise.reading.outcome != "learned":
        return []
    return ["With inputs of mean 0 and deviation 1 the model learns: check the scale of the inputs."]


def _chance(rows: list[Row], confirmed: list[str]) -> list[str]:
    """Whether the failure disappears if only the order of the data, or every random number, is different."""
    held = {row.name: row.reading for row in rows if row.applied and row.reading is not None}
    seed = "other-seed" in held and held["other-seed"].outcome == "learned"
    order = any(row.name == "other-batches" and row.verdict == "cures" for row in rows)
    if confirmed or not (seed or order):
        return []
    if not seed:
        fails = " (it fails with another seed)" if "other-seed" in held and held["other-seed"].fails else ""
        return [f"It does not fail with other batches{fails}: it depends on the order of the data, or on chance."]
    nor = " or with other batches" if order else ""
    return [f"It does not fail with another seed{nor}: it depends on chance."]


class _Bisection:
    """Asks whether each changed run learns where the baseline failed."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline

    def nothing_to_change(self, change: Change) -> str | None:
        return nothing_to_change(change, self.baseline.run, self.baseline.reading)

    def order(self, change: Change, seconds_left: float) -> RunOrder:
        seconds = min(seconds_left, max(LEAST_SECONDS, 5 * self.baseline.seconds))
        order = order_for(change if change is not REPEAT else None, self.baseline.reading, seconds)
        if self.baseline.cut_short and "steps" not in order:
            order["steps"] = self.baseline.reading.steps
        return order

    def judge(self, row: Row, change: Change, facts: RunFacts, description: RunDescription) -> None:
        if change.name == "other-batches" and _same_data(self.baseline.facts, facts):
            row.verdict, row.why, row.notes = "does not apply", "the batches stay the same", []
            return
        if change.name == "other-seed" and (facts.experiment is None or not facts.experiment.acted):
            row.notes.append("the script sets no seed of its own")
        row.reading = read(facts, description)
        if change is REPEAT:
            fails = row.reading.fails or self.baseline.reading.outcome == "slow"
            row.verdict, row.why = ("fails" if fails else "healthy"), row.reading.words
        elif change.kind == "probe":
            row.verdict, row.why = "tells", probe_text(change.name, self.baseline.reading, row.reading)
        else:
            row.verdict, row.why = compare(self.baseline.reading, row.reading)


def _same_data(one: RunFacts, other: RunFacts) -> bool:
    """Whether two runs were trained on the same batches, as far as their fingerprints show."""
    batches = [facts.step_data.batches[:40] for facts in (one, other)]
    prints = [[(batch.input_print, batch.target_print) for batch in held] for held in batches]
    length = min(len(held) for held in prints)
    known = sum(pair != (None, None) for pair in prints[0][:length])
    return known >= 5 and prints[0][:length] == prints[1][:length]
