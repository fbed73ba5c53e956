"""Events that follow from the numbers alone."""

import math

import pytest

from surefoot.record.derived_events import Derived
from surefoot.record.messages import StepRow


def events(rows):
    """Everything that is said about a run of rows."""
    derived = Derived()
    return [event for row in rows for event in derived.take(row)]


def rates(*values):
    return [StepRow(step, 0.0, lr=value) for step, value in enumerate(values)]


def clipped(*shares):
    """Steps of which a share is clipped, as (steps, share) pairs, evenly spread."""
    flags = [math.floor((i + 1) * share) > math.floor(i * share) for count, share in shares for i in range(count)]
    return [StepRow(step, 0.0, clip_factor=0.5 if flag else 1.0) for step, flag in enumerate(flags)]


@pytest.mark.parametrize("after", [3e-1, 1e-4])
def test_a_learning_rate_that_jumps_is_an_event_with_both_values(after):
    (event,) = events(rates(1e-3, 1e-3, after, after))
    assert (event.event, event.step, event.severity) == ("lr-change", 2, "info")
    assert event.evidence == {"before": 1e-3, "after": after}


def test_warm_up_cosine_and_a_rate_of_zero_are_no_events():
    warm = [1e-3 * (step + 1) / 100 for step in range(100)]
    cosine = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 500)) for step in range(500)]
    assert events(rates(*warm, *cosine, 0.0, 1e-3, None, 1e-3, math.nan, 1e-3)) == []


def test_clipping_that_sets_in_is_one_event():
    found = events(clipped((200, 0.05), (60, 1.0)))
    assert [event.event for event in found] == ["clip-burst"]
    assert 200 < found[0].step < 215


def test_clipping_that_comes_back_is_reported_again():
    assert len(events(clipped((200, 0.0), (30, 1.0), (200, 0.0), (30, 1.0)))) == 2


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_steady_clipping_is_no_event(share):
    assert events(clipped((600, share))) == []


def test_clipping_at_the_start_of_a_run_is_no_event():
    assert events(clipped((50, 1.0), (400, 0.1))) == []
