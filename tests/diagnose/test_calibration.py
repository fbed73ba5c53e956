"""The confidence that is shown follows from what was measured."""

from __future__ import annotations

import pytest

from recorded import run
from surefoot.diagnose.calibration import CONSEQUENCES, FIRST, calibrated
from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.diagnose.engine import _judge
from surefoot.diagnose.rule import Claim, Kind, Rule


def test_a_cause_that_was_always_true_keeps_its_confidence_and_one_that_was_not_loses_some() -> None:
    assert calibrated("optim.no-update", "wiring", 0.97, is_first=True) == 0.97
    assert calibrated("optim.weight-decay", "value", 0.9, is_first=True) == 0.9
    assert calibrated("optim.stale-state", "value", 0.8, is_first=True) == pytest.approx(8 / 11)


def test_what_is_often_a_consequence_is_less_certain_than_what_was_never_counted() -> None:
    assert calibrated("model.dead-units", "dynamics", 0.7, is_first=True) == pytest.approx(0.4)
    assert calibrated("model.dead-units", "dynamics", 0.7, is_first=True) < calibrated(
        "rl.kl-blowup", "dynamics", 0.7, is_first=True
    )


@pytest.mark.parametrize(("kind", "left"), [("wiring", 1.0), ("value", 1.0), ("dynamics", 0.8), ("curve", 0.8)])
def test_a_cause_that_was_never_counted_is_less_certain_if_it_was_not_observed_directly(
    kind: Kind, left: float
) -> None:
    assert calibrated("rl.kl-blowup", kind, 0.8, is_first=True) == pytest.approx(0.8 * left)


def test_a_further_finding_is_less_certain_and_less_so_if_it_was_observed_directly() -> None:
    seen = [
        (Rule(code, kind, lambda run: None), Claim(0.9, code))
        for code, kind in (
            ("optim.no-update", "wiring"),
            ("mask.leaks-future", "wiring"),
            ("data.unscaled-target", "value"),
        )
    ]
    found = _judge(run(), seen)[2]
    assert [round(finding.confidence, 3) for finding in found] == [0.9, 0.54, 0.225]


def test_the_counts_are_of_causes_of_the_catalogue() -> None:
    assert FIRST.keys() | CONSEQUENCES <= CATALOGUE.keys()
    assert not FIRST.keys() & CONSEQUENCES
    assert all(0 <= true <= count for true, count in FIRST.values())
