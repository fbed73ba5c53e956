"""Conclusions from all experiments on one step: about the batch, the precision, the update, and the steps before.

Each sentence names the two runs that it follows from. A cause is confirmed if one change that would fix it cures the
run and no change that must fix it fails. A cause that a single step cannot show is not reported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from surefoot.core.wording import capital
from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.experiments.change_causes import causes_of_cures, weigh
from surefoot.experiments.results import Answer, Report, Row, Verdict, sentence
from surefoot.experiments.trials import FLAKY, REPEAT
from surefoot.replay.verdict import fails as fails_in

if TYPE_CHECKING:
    from surefoot.experiments.incident import AppliedAsItWas
    from surefoot.experiments.run_comparison import RunReading
    from surefoot.record.facts import FailingRows

_AT_ONCE = ("data.nonfinite-input", "data.bad-batch", "loss.no-valid-targets", "precision.fp16-overflow")
_LATER = ("model.exploding-gradient", "lr.too-high", "optim.stale-state", "optim.epsilon", "precision.fp16-overflow")
_EVERYWHERE = "every part of the captured batch fails alone, so no single row is the cause"
_BY_EXPERIMENT = 0.9
"""The confidence of a cause that only experiments name."""


def conclude(baseline: AppliedAsItWas, rows: list[Row], before: Diagnosis, script: str) -> Report:
    """The result, as one sentence and a few facts. `before` is the diagnosis of the run."""
    if not baseline.reading.fails:
        return _harmless(baseline, rows, before)
    if baseline.why_not:
        return Report("undecided", baseline.why_not, rows, before)
    if any(row.name == REPEAT.name and row.verdict == "healthy" for row in rows):
        return Report("flaky", f"{FLAKY} when nothing is changed, so no experiment can show a cure.", rows, before)
    by_name = {row.name: row for row in rows}
    chance = next((row.draws for row in rows if _by_chance(row.draws)), None)
    _doubt_luck(by_name, chance)
    hidden = _hides(baseline, by_name, by_chance=chance is not None)
    cures = [row.name for row in rows if row.verdict == "cures"]
    failed = {row.name: row.reading.failed_at for row in rows if row.verdict == "does not" and row.reading}
    unmoved = [name for name, step in failed.items() if step == baseline.reading.failed_at]
    refuted = ["data.nonfinite-input"] if _data_was_finite(baseline, cures) else []
    report = Report("not cured", sentence(rows), rows, weigh(before, cures, list(failed), unmoved, refuted))
    broken = baseline.recorded.state
    report.answer = "cured" if cures else "not cured" if failed or broken else "undecided"
    report.conclusions = [*hidden, *_facts(baseline, by_name, script)]
    report.speaks_for = _causes(baseline, by_name, causes_of_cures(cures, unmoved))
    if _names_operation(before, baseline):  # skipping its batch cures that too
        report.speaks_for = [code for code in report.speaks_for if not code.startswith("data.")]
    if len(report.speaks_for) == 1:
        report.diagnosis = _with(report.diagnosis, report.speaks_for[0], baseline, cures, report.conclusions)
    report.confirms = [f.cause for f in report.diagnosis.findings if f.evidence.get("experiments", {}).get("confirmed")]
    return report


def _harmless(baseline: AppliedAsItWas, rows: list[Row], before: Diagnosis) -> Report:
    """Nothing failed: the step did no harm, it differs from the recorded step, or this cannot be decided."""
    captured, reading = baseline.captured, baseline.reading
    answer: Answer = "no harm"
    text = f"applied as it was, the loss {reading.words}: the step did no harm."
    if fails_in(captured.facts["fingerprints"]):
        answer, text = "flaky", f"{FLAKY}: every value is finite when the step is run again."
    elif captured.level is None or not reading.words.startswith("stays at"):
        known = "too few steps before it are known" if captured.level is None else "too few steps follow it"
        answer, text = "undecided", f"every value is finite, but {known} to decide whether the step did harm."
    report = Report(answer, text, rows, before)
    if answer == "flaky":
        report.conclusions = ["`surefoot replay` without --experiments prints what differs from the recorded step."]
    return report


def _doubt_luck(rows: dict[str, Row], chance: tuple[int, int] | None) -> None:
    """Other batches also use other random numbers: if those alone can avoid the failure, other batches cure nothing."""
    if chance is not None and _is(rows, "other-batches", "cures"):
        others = rows["other-batches"]
        others.verdict = "cannot tell"
        others.why += f"; but this batch fails with only {chance[0]} of {chance[1]} other draws of random numbers"


def _hides(baseline: AppliedAsItWas, rows: dict[str, Row], by_chance: bool) -> list[str]:
    """If other batches fail too, skipping bad steps is not a cure. Corrects the row and returns a sentence.

    If only one batch has non-finite values, the data is at fault and skipping the batch is the cure. The same holds for
    a batch whose update does the harm, if the later steps can be kept.
    """
    if not _is(rows, "skip-batch", "cures"):
        return []
    skipped = rows["skip-batch"]
    count = skipped.reading.left_out if skipped.reading else 0
    elsewhere = _is(rows, "other-batches", "does not") and not _nonfinite_in_batch(baseline)
    if not by_chance and not (elsewhere and (baseline.fails_at_once or count > 1)):
        return []
    steps = skipped.reading.steps if skipped.reading else 0
    text = f"skipping bad steps hides it ({count} of {steps} steps {'was' if count == 1 else 'were'} skipped)"
    skipped.verdict, skipped.why = "does not", text
    return [f"{capital(text)}."]


def _nonfinite_in_batch(baseline: AppliedAsItWas) -> int:
    batch = baseline.recorded.batch
    return 0 if batch is None else batch.nonfinite


def _facts(baseline: AppliedAsItWas, rows: dict[str, Row], script: str) -> list[str]:
    if broken := baseline.recorded.state:
        name, count = next(iter(broken.items()))
        more = f" and in {len(broken) - 1} more" if len(broken) > 1 else ""
        return [f"{count} values of {name}{more} were not finite before the step.", _earlier(script)]
    found = []
    precise = [rows[name].title for name in ("fp32", "bf16") if _is(rows, name, "cures")]
    if precise:
        which = " or ".join(precise)
        found.append(f"With {which}, the same weights and the same batch do not fail: the precision is the cause.")
    bad = _nonfinite_in_batch(baseline)
    are = f"{'is' if bad == 1 else 'are'} not finite"
    if _is(rows, "other-batches", "cures"):
        found.append("From the same weights, other batches do not fail: this batch is the cause.")
        if bad:
            found.append(f"{bad} of its values {are}.")
    elif _is(rows, "other-batches", "does not") and not precise and bad:
        found.append(f"{bad} of this batch's values {are}; from the same weights, another batch also fails.")
    elif _is(rows, "other-batches", "does not") and not precise:
        if baseline.fails_at_once or _begins_high(rows["other-batches"], baseline):
            found.append("From the same weights, another batch also fails: this batch is not the cause.")
        if not any(row.verdict == "cures" for row in rows.values()):
            found.append(_earlier(script))
    if not baseline.fails_at_once and _is(rows, "skip-batch", "cures"):
        found.append("Skipping the step avoids the failure: its update does the harm.")
    searched, seeded = rows.get("tiny-batch"), rows.get("other-seed")
    if searched is not None and searched.verdict == "tells":
        found.append(f"{capital(searched.why)}.")
    elif seeded is not None and _by_chance(seeded.draws):
        found.append(f"The step {seeded.why}.")
    return found


def _begins_high(row: Row, baseline: AppliedAsItWas) -> bool:
    """Whether the first loss, before any update, is above every loss that the run had shown."""
    level = baseline.captured.level
    return level is not None and row.reading is not None and row.reading.start > level.bar


def _earlier(script: str) -> str:
    way = f"`surefoot bisect {script}`" if script else "`surefoot bisect` on the script"
    return (
        "The weights were already damaged before the step, or the model fails on any batch. "
        f"Use {way}, which starts earlier."
    )


def _is(rows: dict[str, Row], name: str, verdict: Verdict) -> bool:
    return name in rows and rows[name].verdict == verdict


def _causes(baseline: AppliedAsItWas, rows: dict[str, Row], spoken_for: list[str]) -> list[str]:
    """Those of the causes whose fixes cured that a single step can show."""
    possible = set(_AT_ONCE if baseline.fails_at_once else _LATER)
    if not _is(rows, "other-batches", "cures"):
        possible -= {"data.nonfinite-input", "data.bad-batch", "loss.no-valid-targets"}
    elif not baseline.fails_at_once:
        possible = {"data.bad-batch"}  # anything that limits its update cures it too
    nonfinite = bool(_nonfinite_in_batch(baseline))
    possible.discard("data.bad-batch" if nonfinite else "data.nonfinite-input")
    if nonfinite or "tiny-batch" not in rows or not rows["tiny-batch"].why.startswith(_EVERYWHERE):
        possible.discard("loss.no-valid-targets")
    if not _is(rows, "bf16", "cures"):
        possible.discard("precision.fp16-overflow")
    return [code for code in spoken_for if code in possible]


def _data_was_finite(baseline: AppliedAsItWas, cures: list[str]) -> bool:
    """Whether the values of the batch were finite: a cure by precision implies it; otherwise the batch was checked."""
    batch = baseline.recorded.batch
    is_finite = batch is not None and batch.handed_out and not batch.nonfinite
    return bool({"fp32", "bf16"} & set(cures)) or (is_finite and baseline.fails_at_once)


def _names_operation(before: Diagnosis, baseline: AppliedAsItWas) -> bool:
    """Whether the diagnosis of the run names the operation that produced the first non-finite value of this step."""
    here = [each for each in before.findings if each.severity != "info" and each.step == baseline.captured.step]
    return baseline.fails_at_once and any(each.cause == "loss.undefined-op" for each in here)


def _with(diagnosis: Diagnosis, cause: str, baseline: AppliedAsItWas, cures: list[str], facts: list[str]) -> Diagnosis:
    """The diagnosis with a cause that only the experiments show, as the first finding."""
    family = cause.split(".")[0]
    known = [each for each in diagnosis.findings if each.evidence.get("experiments", {}).get("confirmed")]
    if any(each.cause == cause for each in diagnosis.findings) or any(each.cause.startswith(family) for each in known):
        return diagnosis
    outcome = {"confirmed": True, "refuted": False, "cured_by": cures, "not_cured_by": []}
    summary = facts[0] if facts else f"step {baseline.captured.step}: cured by {', '.join(cures)}."
    made = Finding(
        cause, "error", _BY_EXPERIMENT, summary, baseline.captured.step, (), {"experiments": outcome},
        tuple(CATALOGUE[cause].fixes),
    )  # fmt: skip
    return replace(diagnosis, verdict="broken", findings=(made, *diagnosis.findings))


# ---- probes ----------------------------------------------------------------------------------------------


def verdict_of_probe(name: str, changed: RunReading) -> tuple[Verdict, str]:
    """The text of a probe that runs steps, for the table."""
    if changed.outcome == "too short":
        return "cannot tell", changed.words
    again, not_again = {
        "other-seed": (
            "also fails with other random numbers",
            "does not fail with other random numbers: it depends on chance",
        ),
        "synthetic-inputs": (
            "also fails on noise: the values of the inputs are not the cause",
            "fails only on its own inputs",
        ),
        "shuffled-labels": ("also fails with shuffled labels", "does not fail with shuffled labels"),
    }[name]
    return "tells", again if changed.fails else not_again


def other_draws(found: FailingRows | None, crash: str = "") -> tuple[int, int] | None:
    """How many other draws of random numbers failed, and how many were tried; `None` if none was tried."""
    if found is None or not found.draws.tries:
        return None
    died = bool(crash) and not found.done  # the script ended with an error during this try
    return found.draws.failed + died, found.draws.tries + died


def verdict_of_draws(draws: tuple[int, int], is_random: bool) -> tuple[Verdict, str]:
    """The result of `other-seed`."""
    failed, tries = draws
    if failed and not is_random:
        return "does not apply", "the step draws no random numbers"
    if failed == tries:
        return "tells", f"fails with {tries} of {tries} other draws of random numbers"
    number = failed or "none"
    return "tells", f"fails with {number} of {tries} other draws of random numbers: it depends on chance"


def _by_chance(draws: tuple[int, int] | None) -> bool:
    """Whether the step, repeated with other random numbers, does not always fail."""
    return draws is not None and draws[0] < draws[1]


def verdict_of_rows(found: FailingRows | None) -> tuple[Verdict, str]:
    """The result of `tiny-batch`: which rows of the batch fail."""
    draws = other_draws(found)
    if draws is not None and _by_chance(draws):
        text = f"fails with {draws[0] or 'none'} of {draws[1]} other draws, so single rows cannot be tested"
        return "tells", f"the step draws random numbers, and {text}"
    if found is not None and found.ahead:
        return "cannot tell", "the script draws batches ahead of their steps, so parts of a batch cannot be tested"
    if found is None or not found.tries:
        return "cannot tell", "the script ended before a part of the batch had been tried"
    single = sorted(found.single)
    if not found.fails:
        return "tells", "all rows of the batch together do not fail"
    if found.everywhere:
        return "tells", _EVERYWHERE
    parts = []
    if single:
        listed = ", ".join(map(str, single))
        parts.append(f"row {listed} alone fails" if len(single) == 1 else f"rows {listed} fail, each alone")
    parts += [f"rows {first} to {last} fail only together" for first, last in found.together]
    if not found.done and found.narrowed:
        first, last = found.narrowed
        parts.append(f"rows {first} to {last} fail; the script ended before single rows were tested")
    batch = "the batch" if found.microbatch is None else f"microbatch {found.microbatch}"
    return "tells", f"{' and '.join(parts)} (of {batch}'s {found.of}, counted from 0)"
