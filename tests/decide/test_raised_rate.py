"""A learning rate that is raised far above all before, and the limit for it after a return."""

import math

import pytest

from surefoot.decide.raised_rate import IN_DOUBT_STEPS, KNOWN_AFTER_STEPS, RateWatch, StepRates
from surefoot.decide.recovery import TrainingRecovery

STEPS = 200
CUT_STEPS = TrainingRecovery().cut_steps

SCHEDULES = {  # the rates of a run, and the rate that its schedule starts from
    "constant": ([1e-3] * STEPS, 0.0),
    "warm-up from 0": ([1e-3 * step / 100 for step in range(STEPS)], 1e-3),
    "a tenfold warm-up in one step": ([1e-8, *([1e-3] * (STEPS - 1))], 0.0),
    "warm restarts": ([1e-3 * (1 + math.cos(math.pi * (step % 50) / 50)) / 2 + 1e-7 for step in range(STEPS)], 1e-3),
    "a restart after a resume at the end of a cycle": ([1e-7] * 100 + [1e-3] * 100, 1e-3),
    "one cycle": ([1e-3 * (1 - abs(step / 100 - 1)) + 4e-5 for step in range(STEPS)], 4e-5),
    "exponential growth": ([1e-6 * 1.1**step for step in range(STEPS)], 0.0),
    "twice as high": ([1e-3] * 100 + [2e-3] * 100, 0.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_ordinary_schedules_do_not_raise_the_rate(name):
    rates, base = SCHEDULES[name]
    watch = RateWatch(TrainingRecovery())
    assert not any(watch.before_step(step, StepRates(rate, base, (1.0,))) for step, rate in enumerate(rates))


def raised(at=100, times=100.0, recovery=None):
    watch = RateWatch(recovery or TrainingRecovery())
    for step in range(at):
        assert not watch.before_step(step, StepRates(1e-3, 0.0, (1.0,)))
    assert watch.before_step(at, StepRates(1e-3 * times, 0.0, (1.0,)))
    assert watch.raised_at == at
    return watch


def test_a_raise_alone_limits_nothing_and_is_an_ordinary_rate_once_the_losses_show_no_damage():
    watch = raised()
    for step in range(100, 100 + IN_DOUBT_STEPS + 1):
        assert watch.raised_at == 100
        assert watch.limit == math.inf
        assert not watch.before_step(step, StepRates(0.1, 0.0, (1.0,)))
        watch.after_step(step, is_healthy=True, calm=step, has_attempts=True)
    assert watch.raised_at is None
    assert not watch.before_step(200, StepRates(0.1, 0.0, (1.0,)))


def test_while_there_is_a_problem_the_weights_stay_in_doubt():
    watch = raised()
    watch.after_step(100 + 2 * IN_DOUBT_STEPS, is_healthy=False, calm=0, has_attempts=True)
    assert watch.raised_at == 100


def test_after_a_return_the_rate_is_limited_until_it_has_come_down():
    watch = raised()
    assert watch.returned()
    watch.before_step(104, StepRates(0.1, 0.0, (1.0,)))
    assert watch.limit == 1e-3
    watch.before_step(105, StepRates(1e-3, 0.0, (1.0,)))
    assert watch.limit == math.inf
    assert watch.raised_at is None


def test_steps_before_the_raise_that_are_repeated_do_not_end_the_limit():
    watch = raised()
    watch.returned()
    for step in range(80, 100):
        watch.before_step(step, StepRates(1e-3, 0.0, (1.0,)))
        watch.after_step(step, is_healthy=True, calm=step - 79, has_attempts=True)
    assert watch.limit == 1e-3
    assert watch.raised_at == 100


def test_a_limit_is_lifted_step_by_step_and_what_was_trained_below_it_is_good():
    watch = raised(times=6.0)
    watch.returned()
    watch.after_step(120, is_healthy=True, calm=CUT_STEPS, has_attempts=False)
    assert watch.limit == 1e-3  # no return is left if the higher rate does damage
    watch.after_step(120, is_healthy=True, calm=CUT_STEPS, has_attempts=True)
    assert watch.limit == 2e-3
    assert watch.raised_at == 121
    watch.after_step(141, is_healthy=True, calm=2 * CUT_STEPS, has_attempts=True)
    watch.returned()
    assert watch.limit == 2e-3  # the last one that did no damage
    for step, calm in ((162, 3), (183, 4)):
        watch.after_step(step, is_healthy=True, calm=calm * CUT_STEPS, has_attempts=True)
    assert watch.limit == math.inf
    assert watch.raised_at is None


def test_a_recovery_that_must_not_change_the_rate_does_not_limit_it():
    watch = raised(recovery=TrainingRecovery(lr_factor=1.0))
    assert not watch.returned()
    assert watch.limit == math.inf


@pytest.mark.parametrize("rate", [None, math.nan, math.inf, 0.0, -1.0])
def test_a_rate_that_is_not_known_is_none(rate):
    watch = RateWatch(TrainingRecovery())
    for step in range(2 * KNOWN_AFTER_STEPS):
        watch.before_step(step, StepRates(1e-3, 0.0, (1.0,)))
    assert not watch.before_step(100, None if rate is None else StepRates(rate, 0.0, (1.0,)))
    assert not watch.before_step(101, StepRates(1e-3, 0.0, (1.0,)))
    assert watch.raised_at is None


@pytest.mark.parametrize(("shares", "is_raise"), [((1.0, 10.0), True), ((1.0, 0.1), False)])
def test_a_group_that_is_raised_alone_is_no_raise(shares, is_raise):
    """A limit would hold for the other group, too."""
    watch = RateWatch(TrainingRecovery())
    for step in range(2 * KNOWN_AFTER_STEPS):
        watch.before_step(step, StepRates(1e-3, 0.0, (1.0, 10.0)))
    assert watch.before_step(100, StepRates(0.1, 0.0, shares)) == is_raise
