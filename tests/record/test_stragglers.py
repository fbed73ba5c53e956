"""Persistent stragglers: which rank, how much slower, since when; what happens in few steps is no straggler."""

from __future__ import annotations

import pytest

import patience
from surefoot.record import stragglers
from surefoot.record.heartbeat import Beat
from surefoot.record.stragglers import ROUNDS, StepClock, StragglerSearch


def beats(*own, step=100, whole=50.0, steps=64):
    return [
        Beat(rank, len(own), own_ms=each, step_ms=whole, measured_steps=steps, step=step)
        for rank, each in enumerate(own)
    ]


def test_a_rank_that_stays_slower_is_reported_once_with_its_figures():
    search = StragglerSearch()
    found = [search.compare(beats(10.0, 11.0, 25.0, 10.5, step=100 + 50 * turn)) for turn in range(ROUNDS + 3)]
    reported = [each for each in found if each is not None]
    assert len(reported) == 1
    straggler = reported[0]
    assert (straggler.rank, straggler.first_step) == (2, 100)
    assert straggler.evidence() == {
        "rank": 2, "own_ms": 25.0, "usual_ms": 10.5, "step_ms": 50.0, "times_slower": 2.381, "first_step": 100,
    }  # fmt: skip
    assert "rank 2 is slower than the others since step 100" in straggler.summary()
    assert "14.5 ms of the 50.0 ms" in straggler.summary()


@pytest.mark.parametrize(
    "rounds",
    [
        [beats(10.0, 11.0)] * 9,
        [beats(10.0, 25.0), beats(25.0, 10.0)] * 5,
        [beats(0.2, 0.9, whole=2.0)] * 9,
        [beats(10.0, 25.0, whole=900.0)] * 9,
        [beats(10.0, 25.0, steps=5)] * 9,
        [beats(10.0, None)] * 9,
    ],
    ids=[
        "alike",
        "taking turns",
        "less than a millisecond",
        "a small share of a step",
        "too few steps",
        "not measured",
    ],
)
def test_healthy_ranks_are_no_stragglers(rounds):
    search = StragglerSearch()
    assert not any(search.compare(each) for each in rounds)


def test_a_straggler_that_recovered_is_reported_again():
    search = StragglerSearch()
    slow, well = [beats(10.0, 25.0)] * ROUNDS, [beats(10.0, 10.0)] * ROUNDS
    assert sum(search.compare(each) is not None for each in [*slow, *well, *slow]) == 2


def test_the_clock_measures_until_the_first_backward_and_rare_evaluations_do_not_count(monkeypatch):
    clock, now = StepClock(), patience.Clock()
    now.perf_counter = now.monotonic
    monkeypatch.setattr(stragglers, "time", now)
    for step in range(40):
        now.now += 0.5 if step % 20 == 19 else 0.010  # the data and the forward; an evaluation now and then
        clock.backward_begins()
        now.now += 0.030
        clock.backward_begins()  # of a second microbatch
        now.now += 0.005
        clock.stepped(step + 1)
    own, whole, count = clock.medians()
    assert (round(own, 3), round(whole, 3), count, clock.steps) == (10.0, 45.0, 39, 40)
    assert StepClock().medians() == (None, None, 0)
