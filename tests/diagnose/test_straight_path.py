"""Paths along which the slope of the loss stays the same, and what only looks like it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from recorded import look, optimizer, run
from surefoot.diagnose.straight_path import slope_kept, straight_path

STEADY = [2.0 - 0.002 * step for step in range(200)]
LOOKS = (0, 20, 60, 150)


def steps(kept: float, ratio: float = 1e-3) -> list[dict[str, Any]]:
    """Sampled steps whose paths keep this share of their slope; the first path does not count."""
    rows = [{"id": 0, "grad": 1.0, "ratio": ratio}]
    found = [look(0, steps=[{"optimizer": 0, "rows": rows}])]
    for before, step in pairwise(LOOKS):
        end = -kept if before else 9.0
        path = {"since": before, "start": -1.0, "end": end, "length": 0.1}
        found.append(look(step, steps=[{"optimizer": 0, "rows": rows, "path": path}]))
    return found


def with_series(losses: list[float], **columns: list[float]) -> list[dict[str, Any]]:
    held = optimizer(losses)
    return [held | {"series": held["series"] | columns}]


def test_the_slopes_at_both_ends_of_the_later_paths_are_compared() -> None:
    found = straight_path(run(STEADY, sampled_steps=steps(0.9)))
    assert found is not None
    assert found.slope_kept == pytest.approx(0.9)
    assert found.moved == pytest.approx(0.2)
    assert found.loss_left == pytest.approx(STEADY[-10] / 2.0, rel=0.02)
    assert found.is_held_back


@pytest.mark.parametrize("kept", [0.3, -1.0, math.nan])
def test_a_slope_that_is_lost_on_the_way_is_limited_by_curvature_or_noise(kept: float) -> None:
    assert straight_path(run(STEADY, sampled_steps=steps(kept))) is None


def test_steps_of_a_usual_size_and_short_runs_say_nothing() -> None:
    assert straight_path(run(STEADY, sampled_steps=steps(0.9, ratio=0.01))) is None
    assert straight_path(run(STEADY[:95], sampled_steps=steps(0.9)[:3])) is None


def test_a_loss_that_has_settled_is_not_held_back() -> None:
    settled = [0.2 + 1.8 * 0.95**step for step in range(200)]
    found = straight_path(run(settled, sampled_steps=steps(0.9)))
    assert found is not None
    assert not found.is_held_back


def test_what_clipping_took_from_a_gradient_counts() -> None:
    norms = [100.0 if step in (20, 60) else 1.0 for step in range(200)]
    clipped = with_series(STEADY, clip_norm=norms, clip_limit=[1.0] * 200)
    assert slope_kept(run(STEADY, sampled_steps=steps(1.0), optimizers=clipped)) == pytest.approx(101 / 200)


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param([0.01] * 40 + [1e-5] * 160, id="lowered"),
        pytest.param([1e-5 * step for step in range(200)], id="warm-up"),
    ],
)
def test_paths_at_a_lowered_or_rising_rate_say_nothing(rates: list[float]) -> None:
    changed = with_series(STEADY, lr=rates)
    assert straight_path(run(STEADY, sampled_steps=steps(0.9), optimizers=changed)) is None
