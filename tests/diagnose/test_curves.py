"""What a curve says: risen, flat, learned, blown up; and when it says nothing."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from recorded import falling
from surefoot.diagnose.curves import LossCurve, present, present_finite

NOISE = random.Random(0)


def curve(values: list[float], **settings: Any) -> LossCurve:
    return LossCurve(values, list(range(len(values))), **settings)


def noisy(values: list[float], size: float) -> list[float]:
    return [value + NOISE.gauss(0, size) for value in values]


def test_a_falling_loss_has_learned() -> None:
    held = curve(noisy(falling(100), 0.05))
    assert held.learned
    assert held.drop == pytest.approx(0.9, abs=0.05)
    assert not any((held.rose, held.flat, held.blew_up))


def test_a_loss_that_stays_is_flat() -> None:
    held = curve(noisy([2.3] * 100, 0.05))
    assert held.flat
    assert not held.learned


def test_a_loss_that_ends_far_above_its_start_has_risen() -> None:
    held = curve([1.0 + 0.05 * i for i in range(100)])
    assert held.rose
    assert not held.learned


def test_a_blow_up_in_the_first_steps_does_not_pass_for_the_beginning() -> None:
    held = curve([2.0, 4e3, 9e4, 5e4, 700.0, *[60.0] * 95])
    assert held.start == 2.0
    assert held.rose
    assert held.blew_up
    assert not held.learned


def test_a_blow_up_that_came_back_is_remembered() -> None:
    held = curve([*falling(50), 900.0, 500.0, *falling(50, 1.0, 0.1)])
    assert held.blew_up
    assert held.learned
    assert held.peak == 900


def test_a_first_loss_that_was_a_fluke_is_no_rise() -> None:
    assert not curve([0.5, *noisy([1.0] * 99, 0.05)]).rose


def test_one_high_first_loss_is_the_beginning_only_if_the_next_ones_agree() -> None:
    assert curve([50.0, *[2.0] * 99]).start == 2.0
    assert curve([2.0] * 100).start == 2.0


def test_a_loss_that_hovers_about_zero_says_nothing() -> None:
    held = curve(noisy([0.0] * 100, 1.0))
    assert held.around_zero
    assert held.learned
    assert not held.rose


def test_a_loss_near_zero_but_above_it_does_not_hover() -> None:
    assert not curve(noisy([5.0] * 100, 1.0)).around_zero


def test_a_loss_that_falls_below_zero_has_learned() -> None:
    assert curve([1.0 - 0.03 * i for i in range(100)]).learned


def test_one_that_is_continued_need_not_fall_and_may_still_rise() -> None:
    assert curve([0.1] * 100, continued=True).learned
    assert not curve([0.1] * 100, continued=True).flat
    assert not curve([0.1 + 0.05 * i for i in range(100)], continued=True).learned


def test_a_blind_one_says_nothing() -> None:
    held = curve([1.0 + i for i in range(100)], blind=True)
    assert held.learned
    assert not any((held.rose, held.flat, held.blew_up))


def test_a_fall_to_chance_is_no_learning() -> None:
    values = falling(100, 9.0, math.log(10))
    assert curve(values).learned
    assert not curve(values, chance=math.log(10)).learned


def test_not_a_number_is_never_learned_and_its_step_is_known() -> None:
    held = curve([*falling(50), math.nan, math.inf])
    assert held.first_bad == 50
    assert held.count == 50
    assert not held.learned
    assert not curve([*falling(50), math.nan], blind=True).learned


@pytest.mark.parametrize("values", [[], [math.nan], [1.0], [0.0] * 10])
def test_short_and_empty_curves_are_read_without_a_complaint(values: list[float]) -> None:
    held = curve(values)
    for name in ("start", "end", "best", "noise", "drop", "best_drop", "rose", "peak", "blew_up", "flat", "learned"):
        getattr(held, name)
    assert [held.learned, held.blew_up, held.rose] == [False] * 3


def test_only_the_numbers_of_a_column_are_present() -> None:
    assert present([1.0, None, math.inf]) == [1.0, math.inf]
    assert present_finite([1.0, None, math.inf, math.nan]) == [1.0]


def test_the_start_that_is_lost_is_the_way_down_to_the_best_constant_answer() -> None:
    losses = [10.0 - 0.1 * step for step in range(95)]
    assert curve(losses, chance=2.0).start_lost == pytest.approx(0.82, abs=0.03)
    assert curve(losses, chance=2.0).starts_far_up
    assert curve(losses, chance=6.0).start_lost == 0.0
    assert curve(losses).start_lost == 0.0
    soon = curve([9.0, 8.0, 7.0, 4.0, 1.0] + [0.5] * 60, chance=2.0)
    assert 0 < soon.start_lost < 0.1
    assert not soon.starts_far_up


def test_a_rebound_is_a_rise_after_a_fall() -> None:
    assert curve(noisy(falling(100), 0.02)).rebound < 0.1
    waves = [1.0 + math.cos(step / 8) for step in range(100)]
    assert curve(waves).rebound > 0.8
    assert curve([1.0] * 3).rebound == 0.0
