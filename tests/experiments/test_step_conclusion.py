"""What the experiments on one step say together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recorded import completed
from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.experiments.incident import AppliedAsItWas, CapturedIncident, _AfterIncident
from surefoot.experiments.plan import BY_NAME
from surefoot.experiments.results import Row
from surefoot.experiments.run_comparison import RunReading
from surefoot.experiments.step_conclusion import (
    conclude,
    other_draws,
    verdict_of_draws,
    verdict_of_probe,
    verdict_of_rows,
)
from surefoot.record.facts import FailingRows, RepeatedDraws, RunFacts

CALM = RunReading("calm", 21, words="stays at 1 (before: 1)", losses=[(100, 1.0)], end=1.0, start=1.0)
BROKEN = RunReading("non-finite", 5, failed_at=100, words="…", losses=[(100, math.nan)])
RISEN = RunReading("risen", 21, failed_at=104, words="rises", losses=[(100, 1.0)], start=1.0)


def baseline(reading: RunReading, loss: Any = 1.0, history: int = 30, **told: Any) -> AppliedAsItWas:
    signals = [{"step": i, "loss": 1.0, "skipped": False} for i in range(100 - history, 100)]
    prints = {"losses": [[{"value": loss}]], "gradients": {}}
    facts = {"step": 100, "signals": signals, "fingerprints": prints, "hardware": {"device": "cpu"}}
    row = {"loss": loss, "grad_norm": 1.0, "lr": 0.1, "applied": True, "skipped": False}
    inside = {"trail": [row], "batch": {"nonfinite": 0}, "state": {}, "seen": {"has_state": True}} | told
    held = {"settings": [{"eps": 1e-8}], "series": {}}
    recorded = RunFacts.from_json(completed(RunFacts, {"experiment": inside, "optimizers": [held]}))
    return AppliedAsItWas(CapturedIncident(Path(), facts), reading, recorded, 3.0)


def concluded(first: AppliedAsItWas, before: tuple[Finding, ...] = (), **verdicts: Any) -> Any:
    rows = [Row("baseline", "baseline", "baseline", "fails", "", first.reading)]
    for name, verdict in verdicts.items():
        change = name.replace("_", "-")
        if isinstance(verdict, tuple):
            rows.append(Row(change, change, "probe", *verdict_of_draws(verdict, True), draws=verdict))
            continue
        reading = {"cures": CALM, "does not": first.reading, "healthy": CALM}.get(verdict)
        if change == "skip-batch" and reading is CALM:
            reading = replace(CALM, left_out=14)
        title = BY_NAME[change].title if change in BY_NAME else change
        rows.append(Row(change, title, "cure", verdict, "", reading))
    return conclude(first, rows, Diagnosis("broken", 100, before), "train.py")


def test_a_spike_that_continues_as_before_did_no_harm() -> None:
    assert concluded(baseline(CALM)).sentence == (
        "applied as it was, the loss stays at 1 (before: 1): the step did no harm."
    )


def test_a_recorded_failure_that_does_not_come_again_is_no_harmless_step() -> None:
    assert concluded(baseline(CALM, loss="nan")).answer == "flaky"
    assert concluded(baseline(BROKEN, loss="nan"), repeat="healthy", fp32="cures").answer == "flaky"


def test_with_too_little_history_nothing_is_said_about_harm() -> None:
    found = concluded(baseline(CALM, history=5))
    assert found.answer == "undecided"
    assert "too few steps before it are known" in found.sentence


def test_another_batch_that_fails_too_points_to_what_came_before() -> None:
    found = concluded(baseline(BROKEN, loss="nan"), other_batches="does not", skip_batch="does not")
    assert found.answer == "not cured"
    assert found.conclusions[0] == "From the same weights, another batch also fails: this batch is not the cause."
    assert "`surefoot bisect train.py`" in found.conclusions[1]


def test_weights_that_were_broken_before_need_no_experiment() -> None:
    first = baseline(BROKEN, loss="nan", state={"fc.weight": 3})
    assert _AfterIncident(first).nothing_to_change(BY_NAME["fp32"]) == "weights were not finite before the step"
    found = concluded(first)
    assert (found.answer, found.conclusions[0]) == (
        "not cured",
        "3 values of fc.weight were not finite before the step.",
    )


def test_what_experiments_confirm_comes_first_and_what_they_refute_is_doubted() -> None:
    inferred = Finding("data.nonfinite-input", "error", 0.97, "…")
    found = concluded(baseline(BROKEN, loss="nan"), (inferred,), fp32="cures", bf16="cures", other_batches="cures")
    assert [finding.cause for finding in found.diagnosis.findings] == [
        "precision.fp16-overflow",
        "data.nonfinite-input",
    ]
    assert found.diagnosis.findings[1].confidence < 0.5
    batch = concluded(baseline(BROKEN, loss="nan", batch={"nonfinite": 2}), other_batches="cures", skip_batch="cures")
    assert batch.confirms == ["data.nonfinite-input"]
    assert batch.conclusions[1] == "2 of its values are not finite."


def test_a_batch_that_came_in_finite_is_not_confirmed_to_be_broken() -> None:
    blamed = Finding("data.nonfinite-input", "error", 0.97, "…", 100)
    first = baseline(BROKEN, math.nan, batch={"nonfinite": 0, "handed_out": True})
    report = concluded(first, (blamed,), other_batches="cures", skip_batch="cures")
    (found,) = [each for each in report.diagnosis.findings if each.cause == "data.nonfinite-input"]
    assert "data.nonfinite-input" not in report.confirms
    assert found.evidence["experiments"]["refuted"]
    assert found.confidence < 0.5


def test_experiments_do_not_blame_the_batch_for_an_operation_that_is_named() -> None:
    named = Finding("loss.undefined-op", "error", 0.95, "log at train.py:14 …", 100)
    for handed_out, bad in [(True, 0), (False, 1)]:
        first = baseline(BROKEN, math.nan, batch={"nonfinite": bad, "handed_out": handed_out})
        report = concluded(first, (named,), other_batches="cures", skip_batch="cures")
        assert [each.cause for each in report.diagnosis.findings] == ["loss.undefined-op"]
        assert report.confirms == []


def test_a_rise_that_only_this_batch_brings_is_not_blamed_on_the_rate() -> None:
    found = concluded(baseline(RISEN), lr_10="cures", clip="cures", other_batches="cures", skip_batch="cures")
    assert found.speaks_for == ["data.bad-batch"]
    assert "lr.too-high" in concluded(baseline(RISEN), lr_10="cures", clip="cures", other_batches="does not").speaks_for


@pytest.mark.parametrize(
    ("reading", "name", "why"),
    [
        (BROKEN, "clip", "the step fails before anything is updated"),
        (BROKEN, "tiny-batch", None),
        (RISEN, "clip", None),
        (RISEN, "tiny-batch", "the loss of the step is not unusually high, so no single row can be responsible"),
        (RISEN, "synthetic-inputs", "the expected loss is not known in this case"),
        (RISEN, "deterministic", "everything runs on the CPU"),
    ],
)
def test_no_run_is_spent_on_what_cannot_reach_the_failure(reading: RunReading, name: str, why: str | None) -> None:
    assert _AfterIncident(baseline(reading)).nothing_to_change(BY_NAME[name]) == why


def test_a_lower_rate_is_given_the_steps_to_come_as_far() -> None:
    question = _AfterIncident(baseline(RISEN))
    assert question.order(BY_NAME["clip"], 100.0)["follow"] == 20
    assert question.order(BY_NAME["lr-10"], 100.0)["follow"] == 70
    assert _AfterIncident(baseline(BROKEN)).order(BY_NAME["lr-10"], 100.0)["follow"] == 20


def test_rows_are_reported_as_far_as_they_are_known() -> None:
    found = FailingRows(of=32, tries=9, fails=True, single=[17], done=True)
    assert verdict_of_rows(found)[1].startswith("row 17 alone fails (of the batch's 32")
    early = replace(found, single=[], done=False, narrowed=[16, 23], microbatch=1)
    words = verdict_of_rows(early)[1]
    assert words.startswith("rows 16 to 23 fail; the script ended before single rows were tested (of microbatch 1's")
    assert verdict_of_rows(replace(found, tries=0))[0] == "cannot tell"
    assert verdict_of_rows(None)[0] == "cannot tell"


def test_a_probe_that_runs_steps_says_what_fails_with_it() -> None:
    assert verdict_of_probe("synthetic-inputs", CALM) == ("tells", "fails only on its own inputs")
    assert verdict_of_probe("shuffled-labels", BROKEN)[1] == "also fails with shuffled labels"
    assert verdict_of_probe("other-seed", RunReading("too short", 0, words="over"))[0] == "cannot tell"


def drawn(failed: int, tries: int, done: bool = True) -> FailingRows:
    return FailingRows(tries=1, done=done, draws=RepeatedDraws(random=True, tries=tries, failed=failed))


def test_where_chance_decides_no_row_is_spoken_of() -> None:
    assert verdict_of_rows(drawn(3, 10))[1] == (
        "the step draws random numbers, and fails with 3 of 10 other draws, so single rows cannot be tested"
    )
    assert (
        verdict_of_draws((3, 10), True)[1] == "fails with 3 of 10 other draws of random numbers: it depends on chance"
    )
    assert verdict_of_draws((10, 10), True)[1] == "fails with 10 of 10 other draws of random numbers"
    assert verdict_of_draws((1, 1), False) == ("does not apply", "the step draws no random numbers")


def test_a_script_that_dies_of_a_draw_has_failed_with_it() -> None:
    assert other_draws(drawn(0, 2, done=False), "ValueError: NaN") == (1, 3)
    assert other_draws(drawn(3, 10)) == (3, 10)
    assert other_draws(drawn(0, 0, done=False), "ValueError: NaN") is None


def test_other_batches_that_may_have_been_lucky_are_no_cure() -> None:
    found = concluded(baseline(BROKEN, loss="nan"), other_batches="cures", other_seed=(3, 10))
    assert (found.cures, found.speaks_for) == ([], [])
    assert not any("this batch is the cause" in words for words in found.conclusions)
    assert concluded(baseline(BROKEN, loss="nan"), other_batches="cures", other_seed=(10, 10)).cures == [
        "other-batches"
    ]


def test_where_other_batches_fail_leaving_out_bad_steps_only_hides_it() -> None:
    found = concluded(baseline(BROKEN, loss="nan"), other_batches="does not", skip_batch="cures")
    assert (found.answer, found.cures) == ("not cured", [])
    assert found.sentence == "no single change that was tried cures it; other batches and batch skipped do not."
    assert found.conclusions[:2] == [
        "Skipping bad steps hides it (14 of 21 steps were skipped).",
        "From the same weights, another batch also fails: this batch is not the cause.",
    ]
    assert "`surefoot bisect train.py`" in found.conclusions[2]
    by_chance = concluded(baseline(BROKEN, loss="nan"), skip_batch="cures", other_seed=(3, 10))
    assert by_chance.answer == "not cured"
    assert by_chance.conclusions[1:] == [
        "The step fails with 3 of 10 other draws of random numbers: it depends on chance."
    ]


def test_leaving_out_one_of_several_broken_batches_is_a_cure() -> None:
    first = baseline(BROKEN, loss="nan", batch={"nonfinite": 2})
    found = concluded(first, other_batches="does not", skip_batch="cures")
    assert found.cures == ["skip-batch"]
    assert found.conclusions == [
        "2 of this batch's values are not finite; from the same weights, another batch also fails."
    ]
