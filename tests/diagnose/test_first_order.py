"""A loss that falls as its gradients predict, and what only looks like it."""

from __future__ import annotations

from typing import Any

import pytest

from recorded import look, optimizer, run
from surefoot.diagnose.first_order import straight_fall

STEADY = [2.0 - 0.004 * step for step in range(200)]


def steps(gain: float, ratio: float = 1e-3) -> list[dict[str, Any]]:
    rows = [{"id": 0, "grad": 1.0, "ratio": ratio, "gain": 0.75 * gain}, {"id": 0, "grad": 1.0, "gain": 0.25 * gain}]
    return [look(step, steps=[{"optimizer": 0, "rows": rows}]) for step in (0, 20, 60, 150)]


def with_series(losses: list[float], **columns: list[float]) -> list[dict[str, Any]]:
    held = optimizer(losses)
    return [held | {"series": held["series"] | columns}]


def test_the_second_half_is_compared_with_the_prediction_for_the_same_steps() -> None:
    found = straight_fall(run(STEADY, sampled_steps=steps(0.005)))
    assert found is not None
    assert found.fall / found.predicted == pytest.approx(0.8, rel=0.02)
    assert found.late == pytest.approx(0.5, abs=0.05)


def test_a_fall_far_below_the_prediction_is_limited_by_curvature_or_noise() -> None:
    assert straight_fall(run(STEADY, sampled_steps=steps(0.04))) is None


def test_steps_of_a_usual_size_and_short_runs_say_nothing() -> None:
    assert straight_fall(run(STEADY, sampled_steps=steps(0.005, ratio=0.01))) is None
    assert straight_fall(run(STEADY[:95], sampled_steps=steps(0.005)[:3])) is None


def test_a_loss_that_has_settled_is_not_slow() -> None:
    settled = [0.2 + 1.8 * 0.95**step for step in range(200)]
    assert straight_fall(run(settled, sampled_steps=steps(1e-5))) is None


def test_what_clipping_took_from_the_gradient_counts() -> None:
    clipped = with_series(STEADY, clip_norm=[100.0] * 200, clip_limit=[1.0] * 200)
    assert straight_fall(run(STEADY, sampled_steps=steps(0.005), optimizers=clipped)) is None
    assert straight_fall(run(STEADY, sampled_steps=steps(5e-5), optimizers=clipped)) is not None


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param([0.01] * 40 + [1e-5] * 160, id="lowered"),
        pytest.param([1e-5 * step for step in range(200)], id="warm-up"),
    ],
)
def test_steps_at_a_lowered_or_rising_rate_say_nothing(rates: list[float]) -> None:
    changed = with_series(STEADY, lr=rates)
    assert straight_fall(run(STEADY, sampled_steps=steps(0.005), optimizers=changed)) is None
