"""What the runs of a bisection say together."""

from __future__ import annotations

import math

from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.experiments.baseline import Baseline
from surefoot.experiments.bisect import _conclude
from surefoot.experiments.plan import BY_NAME
from surefoot.experiments.results import Report, Row
from surefoot.experiments.run_comparison import RunReading, probe_text
from surefoot.record.facts import RunFacts

BROKEN = RunReading("non-finite", 30, failed_at=5, losses=[(5, math.nan)])
LEARNED = RunReading("learned", 200, start=1.0, end=0.1, words="fell to 0.1")


def concluded(*findings: Finding, **runs: tuple[str, RunReading]) -> Report:
    baseline = Baseline(BROKEN, Diagnosis("broken", 30, findings), RunFacts(), 1.0, False)
    rows = [Row("baseline", "baseline", "baseline", "fails", "", BROKEN)]
    for name, (verdict, reading) in runs.items():
        change = BY_NAME[name.replace("_", "-")]
        rows.append(Row(change.name, change.title, change.kind, verdict, "", reading))  # type: ignore[arg-type]
    return _conclude(baseline, rows)


SURE = Finding("loss.undefined-op", "error", 0.93, "log at line 25")


def test_what_another_order_or_seed_makes_go_away_depends_on_chance() -> None:
    both = concluded(SURE, lr_3=("cures", LEARNED), other_batches=("cures", LEARNED), other_seed=("tells", LEARNED))
    assert both.conclusions == ["It does not fail with another seed or with other batches: it depends on chance."]
    assert both.guesses == []
    assert "data.unshuffled" in both.speaks_for
    seed = concluded(SURE, lr_3=("cures", LEARNED), other_seed=("tells", LEARNED))
    assert seed.conclusions == ["It does not fail with another seed: it depends on chance."]
    order = concluded(SURE, other_batches=("cures", LEARNED), other_seed=("tells", BROKEN))
    assert order.conclusions[0].startswith("It does not fail with other batches (it fails with another seed)")
    assert concluded(SURE, lr_3=("cures", LEARNED), other_seed=("tells", BROKEN)).conclusions == []


def test_a_confirmed_cause_is_not_put_down_to_chance() -> None:
    unshuffled = Finding("data.unshuffled", "error", 0.7, "…")
    assert concluded(unshuffled, other_batches=("cures", LEARNED)).conclusions == []


UNSCALED = Finding("data.unscaled-input", "error", 0.8, "a typical size of 1460")
FELL = RunReading("learned", 200, start=2e10, end=2.3e5)


def test_a_run_that_learns_from_scaled_noise_alone_points_to_the_scale_of_its_inputs() -> None:
    found = concluded(SURE, UNSCALED, lr_3=("does not", BROKEN), synthetic_inputs=("tells", LEARNED))
    assert (found.answer, found.confirms) == ("not cured", ["data.unscaled-input"])
    assert found.conclusions == [
        "With inputs of mean 0 and deviation 1 the model learns: check the scale of the inputs."
    ]
    assert [each.cause for each in found.diagnosis.findings] == ["data.unscaled-input", "loss.undefined-op"]
    assert found.diagnosis.findings[0].confidence == 0.95
    for other in (
        concluded(UNSCALED, lr_3=("cures", LEARNED), synthetic_inputs=("tells", LEARNED)),
        concluded(UNSCALED, lr_3=("does not", BROKEN), synthetic_inputs=("tells", BROKEN)),
        concluded(Finding("data.nonfinite-input", "error", 0.9, "…"), synthetic_inputs=("tells", LEARNED)),
    ):
        assert (other.confirms, other.conclusions) == ([], [])


def test_a_few_rows_are_learned_only_if_their_loss_really_fell() -> None:
    assert probe_text("tiny-batch", BROKEN, LEARNED).startswith("a few rows are learned (from 1 to 0.1)")
    hardly = probe_text("tiny-batch", BROKEN, RunReading("learned", 200, start=2.3, end=1.9))
    assert hardly == "a few rows are hardly learned: their loss only falls from 2.3 to 1.9"
    assert probe_text("tiny-batch", BROKEN, RunReading("learned", 200, start=1.0, end=-2.0)).startswith(
        "a few rows are learned"
    )
    found = concluded(tiny_batch=("tells", FELL), synthetic_inputs=("tells", LEARNED))
    assert found.rows[1].why.startswith(
        "a few rows are not learned: their loss ends at 2.3e+05, far above 0.1 on noise"
    )


def test_noise_that_is_learned_is_distinguished_from_noise_that_merely_does_not_fail() -> None:
    assert probe_text("synthetic-inputs", BROKEN, LEARNED).startswith("learns with inputs of mean 0 and deviation 1")
    assert probe_text("synthetic-inputs", BROKEN, RunReading("stuck", 200)).startswith(
        "does not fail with inputs of mean 0"
    )
    assert probe_text("synthetic-inputs", BROKEN, BROKEN).startswith("also fails on noise")
