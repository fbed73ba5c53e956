"""Sampled steps take a fraction of a second, and then two percent of the run's time."""

from surefoot.watch import sampling_budget
from surefoot.watch.sampling_budget import SamplingBudget


def test_cheap_steps_fit_and_expensive_ones_wait_until_there_is_time(monkeypatch):
    now = 100.0
    monkeypatch.setattr(sampling_budget.time, "perf_counter", lambda: now)
    budget = SamplingBudget()
    budget.begin()
    for _ in range(18):
        assert budget.allows()
        budget.pay(0.02)
    assert budget.allows(), "0.36 seconds so far, 0.02 more"
    budget.pay(0.03)
    assert not budget.allows()
    assert budget.allows(times=3.0), "something new has begun"
    now = 102.0
    assert budget.allows(), "two percent of 2 seconds"
    budget.pay(1.0)
    now = 140.0
    assert not budget.allows()
    now = 210.0
    assert budget.allows()


def test_a_long_run_spends_two_percent(monkeypatch):
    now = 0.0
    monkeypatch.setattr(sampling_budget.time, "perf_counter", lambda: now)
    budget = SamplingBudget()
    budget.begin()
    while now < 1_000.0:
        if budget.allows():
            budget.pay(0.1)
        now += 0.03
    assert 0.018 * now < budget.spent < 0.021 * now
