"""A loss that has lost a good share of what the run had gained."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from surefoot import Signals

RNG = np.random.default_rng(0)


def learning(steps, start=2.5, end=0.3, half_life=40, noise=0.05, seed=0):
    rng = np.random.default_rng(seed)
    return [end + (start - end) * 0.5 ** (i / half_life) + noise * rng.standard_normal() for i in range(steps)]


def setbacks(losses, rule=sf.Setback(), on_device=False):  # noqa: B008 (frozen)
    state, found = rule.init(), []
    for step, loss in enumerate(losses):
        value = torch.tensor(loss, dtype=torch.float32) if on_device else loss
        state, verdict = rule.update(state, Signals(step, value))
        if bool(verdict.anomalous):
            found.append(step)
    return found


def test_a_loss_back_at_the_level_of_the_start_is_a_setback_at_every_step():
    losses = learning(200) + [2.4] * 15
    assert setbacks(losses) == list(range(200, 215))


def test_noise_alone_has_hardly_one_and_never_two_in_a_row():
    for seed in range(20):
        found = setbacks(learning(600, noise=0.3, seed=seed))
        assert len(found) <= 6
        assert not any(later - earlier == 1 for earlier, later in pairwise(found))


def test_a_schedule_that_restarts_costs_some_of_the_gain_and_is_none():
    losses = learning(300) + [0.3 + 0.4 * 0.5 ** (i / 20) for i in range(60)]
    assert setbacks(losses) == []


def test_a_slow_rise_is_none():
    """As a weight on a second term of the loss that grows over the run."""
    assert setbacks([1.0 + 0.01 * i + 0.05 * RNG.standard_normal() for i in range(500)]) == []


def test_losses_of_any_sign_and_size_are_judged_alike():
    losses = learning(200) + [2.4] * 15
    expected = setbacks(losses)
    assert expected
    assert setbacks([loss - 10 for loss in losses]) == expected
    assert setbacks([1e-6 * loss for loss in losses]) == expected
    assert setbacks([1e6 * loss - 1e6 for loss in losses]) == expected


def test_one_nan_neither_counts_nor_ends_a_setback():
    losses = [*learning(200), 2.4, float("nan"), 2.4, 0.3]
    assert setbacks(losses) == [200, 202]


def test_a_level_that_stays_is_accepted_in_the_end():
    losses = learning(200) + [2.4] * 300
    found = setbacks(losses, sf.Setback(accept_after=40))
    assert found == list(range(200, 240))


def test_nothing_is_said_before_there_is_something_to_lose():
    assert setbacks([1.0] * 20 + [100.0] * 5) == []


@given(st.lists(st.floats(-1e3, 1e3), min_size=40, max_size=120))
def test_host_and_device_agree(losses):
    exact = [float(np.float32(loss)) for loss in losses]
    near = 1e-3 * max(1.0, *map(abs, exact))
    host, device = setbacks(exact), setbacks(exact, on_device=True)
    if host != device:  # allowed only where a loss lies on the bar to rounding
        step = min(set(host) ^ set(device))
        window = exact[:step]
        assert min(abs(exact[step] - other) for other in window) < near or len(window) < 40
