"""The table of fixes agrees with the catalogue, and experiments move the findings the right way."""

from __future__ import annotations

import pytest

from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.errors import UsageError
from surefoot.experiments.change_causes import FIXES, MUST, causes_of_cures, weigh
from surefoot.experiments.plan import BY_NAME, chosen


@pytest.mark.parametrize("code", FIXES)
def test_every_change_quotes_a_fix_of_the_catalogue(code: str) -> None:
    for change, words in FIXES[code].items():
        assert BY_NAME[change].kind == "cure"
        assert any(words in fix for fix in CATALOGUE[code].fixes), (change, words)


def test_what_must_cure_is_among_the_fixes() -> None:
    assert all(change in FIXES[code] for code, changes in MUST.items() for change in changes)


def diagnosis(*findings: tuple[str, str, float]) -> Diagnosis:
    made = (Finding(cause, severity, confidence, "…") for cause, severity, confidence in findings)  # type: ignore[arg-type]
    return Diagnosis("broken", 100, tuple(made))


def test_what_is_confirmed_outranks_what_is_inferred() -> None:
    given = diagnosis(("init.too-large", "error", 0.9), ("lr.too-high", "error", 0.6), ("repro.unseeded", "info", 0.5))
    found = weigh(given, cures=["lr-3", "lr-10"], failures=["clip"], unmoved=["clip"]).findings
    assert [f.cause for f in found] == ["lr.too-high", "init.too-large", "repro.unseeded"]
    assert found[0].confidence == pytest.approx(0.9)
    assert found[0].evidence["experiments"] == {
        "confirmed": True,
        "refuted": False,
        "cured_by": ["lr-3", "lr-10"],
        "not_cured_by": ["clip"],
    }
    assert (found[1].confidence, found[1].evidence) == (0.9, {})


def test_what_does_not_cure_although_it_must_speaks_against_the_cause() -> None:
    given = diagnosis(("precision.fp16-overflow", "error", 0.9), ("lr.too-high", "warning", 0.5))
    found = weigh(given, cures=["lr-3", "lr-10"], failures=["fp32", "bf16"], unmoved=["fp32"]).findings
    assert [f.cause for f in found] == ["lr.too-high", "precision.fp16-overflow"]
    assert found[1].confidence == pytest.approx(0.45)
    assert found[1].evidence["experiments"]["refuted"]


def test_a_failure_that_came_later_refutes_nothing() -> None:
    (found,) = weigh(
        diagnosis(("lr.too-high", "error", 0.9)), cures=[], failures=["lr-3", "lr-10"], unmoved=[]
    ).findings
    assert found.confidence == 0.9
    assert found.evidence["experiments"]["not_cured_by"] == ["lr-3", "lr-10"]


def test_a_cure_speaks_for_causes_that_it_would_fix_and_that_nothing_refutes() -> None:
    assert causes_of_cures(["eps"], ["lr-3"]) == ["optim.epsilon"]
    assert "lr.too-high" not in causes_of_cures(["clip"], ["lr-10"])
    assert "model.exploding-gradient" in causes_of_cures(["clip"], ["lr-10"])


def test_only_takes_names_of_the_plan_in_its_order() -> None:
    assert [change.name for change in chosen("fp32, lr-3")] == ["lr-3", "fp32"]
    assert len(chosen("")) == 16
    with pytest.raises(UsageError, match=r"no change 'lr'\. Choose from lr-3, lr-10"):
        chosen("lr")
