"""Sampled steps take a fraction of a second, and then two percent of the run's time."""

import pytest

from surefoot.watch import sampling_budget
from surefoot.watch.sampling_budget import ALWAYS, ALWAYS_ON_DEVICE, SamplingBudget


def started(monkeypatch):
    """A budget at a time that the test sets, after the first steps, which cost nothing."""
    clock = [100.0]
    monkeypatch.setattr(sampling_budget.time, "perf_counter", lambda: clock[0])
    budget = SamplingBudget()
    budget.begin()
    return budget, clock


def test_the_first_few_are_sampled_whatever_they_cost(monkeypatch):
    budget, _ = started(monkeypatch)
    for _ in range(ALWAYS):
        assert budget.allows()
        budget.pay(5.0)
    assert not budget.allows(), "five seconds more"
    assert budget.spent == 0.0


def test_cheap_steps_fit_and_then_wait_until_there_is_time(monkeypatch):
    budget, clock = started(monkeypatch)
    for _ in range(ALWAYS + 23):
        assert budget.allows()
        budget.pay(0.02)
    assert budget.allows(), "0.46 seconds so far, 0.02 more"
    budget.pay(0.03)
    assert not budget.allows()
    assert budget.allows(times=3.0), "something new has begun"
    clock[0] += 2.0
    assert budget.allows(), "two percent of 2 seconds"


def test_a_step_that_took_very_long_counts_as_a_few_usual_ones(monkeypatch):
    budget, _ = started(monkeypatch)
    for seconds in (0.02,) * 6 + (2.0,):
        budget.pay(seconds)
    assert budget.spent == pytest.approx(0.02 + 0.02 + 0.08)
    assert budget.allows()


def test_a_long_run_spends_two_percent(monkeypatch):
    budget, clock = started(monkeypatch)
    while clock[0] < 1_100.0:
        if budget.allows():
            budget.pay(0.1)
        clock[0] += 0.03
    assert 19.0 < budget.spent < 20.6


def test_on_a_device_fewer_steps_are_sampled_at_the_beginning(monkeypatch):
    budget, clock = started(monkeypatch)
    budget.is_on_device = True
    for _ in range(ALWAYS_ON_DEVICE):
        assert budget.allows()
        budget.pay(0.1)
    assert budget.allows(), "a tenth of a second"
    budget.pay(0.1)
    assert not budget.allows()
    clock[0] += 5.1
    assert budget.allows(), "two percent of 5 seconds"
