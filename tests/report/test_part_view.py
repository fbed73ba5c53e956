"""One optimizer as the terminal shows it."""

import math

import pytest

from surefoot.record.messages import StepRow
from surefoot.report.part_view import Pace, PartView


def test_the_pace_is_unknown_until_two_steps_at_different_times():
    pace = Pace()
    assert pace.steps_per_second is None
    pace.add(10.0, 0)
    pace.add(10.0, 1)
    assert pace.steps_per_second is None
    pace.add(12.0, 4)
    assert pace.steps_per_second == pytest.approx(2.0)


def test_a_step_that_goes_back_and_a_reset_start_the_pace_anew():
    pace = Pace()
    for step in range(10):
        pace.add(float(step), step)
    pace.add(11.0, 3)
    assert pace.steps_per_second is None
    pace.add(11.5, 4)
    pace.reset()
    assert pace.steps_per_second is None


def test_a_time_that_is_not_finite_is_ignored():
    pace = Pace()
    for step, time in enumerate((0.0, math.nan, math.inf, 1.0)):
        pace.add(time, step)
    assert pace.steps_per_second == pytest.approx(3.0)


def test_what_a_row_does_not_say_stays_as_it_was():
    part = PartView()
    part.add(StepRow(0, 0.0, loss=2.0, grad_norm=1.0, lr=0.1, loss_scale=1024.0))
    part.add(StepRow(1, 1.0))
    assert (part.step, part.loss, part.grad_norm, part.lr, part.loss_scale) == (1, 2.0, 1.0, 0.1, 1024.0)


def test_the_share_of_clipped_steps_counts_only_steps_that_could_be_clipped():
    part = PartView()
    assert part.clip_share is None
    for factor in (None, 1.0, 0.5, 0.1, 1.0):
        part.add(StepRow(0, 0.0, clip_factor=factor))
    assert part.clip_share == pytest.approx(0.5)


def test_a_nan_is_shown_and_not_smoothed():
    part = PartView()
    for step, loss in enumerate((1.0, 3.0, math.nan)):
        part.add(StepRow(step, float(step), loss=loss))
    assert math.isnan(part.loss)
    assert part.smoothed == pytest.approx(2.0)
