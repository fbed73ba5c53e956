"""What the runs of a bisection say together."""

from __future__ import annotations

import math

from surefoot.diagnose.experiments.baseline import Baseline
from surefoot.diagnose.experiments.bisect import _conclude
from surefoot.diagnose.experiments.judge import Reading
from surefoot.diagnose.experiments.plan import BY_NAME
from surefoot.diagnose.experiments.results import Report, Row
from surefoot.diagnose.findings import Diagnosis, Finding

BROKEN = Reading("non-finite", 30, failed_at=5, losses=[(5, math.nan)])
LEARNED = Reading("learned", 200, start=1.0, end=0.1, words="fell to 0.1")


def concluded(*findings: Finding, **runs: tuple[str, Reading]) -> Report:
    baseline = Baseline(BROKEN, Diagnosis("broken", 30, findings), {}, 1.0, False)
    rows = [Row("baseline", "baseline", "baseline", "fails", "", BROKEN)]
    for name, (verdict, reading) in runs.items():
        change = BY_NAME[name.replace("_", "-")]
        rows.append(Row(change.name, change.title, change.kind, verdict, "", reading))  # type: ignore[arg-type]
    return _conclude(baseline, rows)


SURE = Finding("loss.undefined-op", "error", 0.93, "log at line 25")


def test_what_another_order_or_seed_makes_go_away_depends_on_chance() -> None:
    both = concluded(SURE, lr_3=("cures", LEARNED), other_batches=("cures", LEARNED), other_seed=("tells", LEARNED))
    assert both.conclusions == [
        "With another seed it does not fail, nor with the data in another order: it depends on chance."
    ]
    assert both.guesses == []
    assert "data.unshuffled" in both.speaks_for
    seed = concluded(SURE, lr_3=("cures", LEARNED), other_seed=("tells", LEARNED))
    assert seed.conclusions == ["With another seed it does not fail: it depends on chance."]
    order = concluded(SURE, other_batches=("cures", LEARNED), other_seed=("tells", BROKEN))
    assert order.conclusions[0].startswith("With the same data in another order it does not fail (with another seed it")
    assert concluded(SURE, lr_3=("cures", LEARNED), other_seed=("tells", BROKEN)).conclusions == []


def test_a_confirmed_cause_is_not_put_down_to_chance() -> None:
    unshuffled = Finding("data.unshuffled", "error", 0.7, "…")
    assert concluded(unshuffled, other_batches=("cures", LEARNED)).conclusions == []
