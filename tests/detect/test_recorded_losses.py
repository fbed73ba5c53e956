"""`judge_losses`: what is wrong with a list of losses, also a short one."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import INF, NAN


def named(losses):
    return [(found.step, found.kind) for found in sf.judge_losses(losses)]


def test_the_spike_and_the_nan_of_a_short_list_are_named():
    spike, broken = sf.judge_losses([2.3, 2.1, 1.60, 9.80, NAN, 1.5, 1.4])
    assert (spike.step, spike.kind, spike.severity) == (3, "spike", "warning")
    assert "the loss jumps to 9.8" in spike.summary
    assert (broken.step, broken.kind, broken.severity) == (4, "nonfinite", "error")
    assert "the loss is nan" in broken.summary


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_loss_that_is_not_finite_is_named_wherever_it_is(bad, place):
    losses = [2.0, 1.9, 1.8, 1.7, 1.6]
    losses[place] = bad
    assert named(losses) == [(place, "nonfinite")]
    assert named([bad]) == [(0, "nonfinite")]


def test_what_lasts_is_one_incident_with_its_last_step():
    first, second = sf.judge_losses([2.0, 1.9, 1.8, 40.0, 50.0, 1.7, NAN, NAN, NAN])
    assert (first.step, first.evidence["last_step"]) == (3, 4)
    assert "stays high for 2 steps" in first.summary
    assert (second.step, second.evidence["last_step"]) == (6, 8)
    assert "and so are the next 2" in second.summary


def test_a_spike_does_not_hide_the_next_one_and_a_new_level_is_accepted():
    assert named([2.0, 1.9, 1.8, 40.0, 1.7, 45.0, 1.6]) == [(3, "spike"), (5, "spike")]
    assert [step for step, _ in named([2.0, 1.9, 1.8, *[40.0, 39.0, 41.0] * 3])] == [3]


def test_spikes_of_a_long_list_are_those_of_the_detector():
    losses = np.random.default_rng(0).normal(1.0, 0.05, 300)
    losses[200] = 6.0
    assert named(losses) == [(200, "spike")]


def test_a_long_curve_that_runs_away_slowly_is_named():
    noise = np.random.default_rng(0).normal(0, 0.05, 600)
    assert [kind for _, kind in named(1.0 + np.exp(np.linspace(-3, 9, 600)) + noise)] == ["loss"]


CURVES = {
    "falling": lambda draw, count: 3 * np.exp(-np.arange(count) / 10) + 0.1 * draw.random(count),
    "noisy": lambda draw, count: 1 + 0.3 * draw.normal(size=count),
    "negative": lambda draw, count: -np.arange(count) * 0.1 + draw.normal(size=count),
    "around zero": lambda draw, count: draw.normal(size=count),
    "uniform": lambda draw, count: draw.random(count),
    "constant": lambda draw, count: np.full(count, 0.7),
    "zeros": lambda draw, count: np.zeros(count),
    "warm restarts": lambda draw, count: 1 + 0.5 * (np.arange(count) % 10 == 0) + 0.05 * draw.random(count),
}


@pytest.mark.parametrize("name", CURVES)
def test_nothing_is_named_in_short_lists_of_healthy_losses(name):
    curves = Counter(tuple(CURVES[name](np.random.default_rng(seed), 40)) for seed in range(100))
    false = [(curve, times) for curve, times in curves.items() if named(curve)]  # without noise, all are one curve
    assert sum(times for _, times in false) <= 100 * 0.02  # of 3 numbers, some are close together by chance
    for curve, _ in [*false, *list(curves.items())[:10]]:  # and so nothing more is named in shorter ones
        whole = named(curve)
        for count in (1, 2, 3, 5, 10, 20):
            assert named(curve[:count]) == [each for each in whole if each[0] < count]


@given(st.lists(st.floats(width=32), max_size=80))
def test_any_list_is_judged_and_everything_that_is_not_finite_is_named(losses):
    found = sf.judge_losses(losses)
    bad = {step for step, loss in enumerate(losses) if not np.isfinite(loss)}
    covered = set()
    for each in found:
        if each.kind == "nonfinite":
            covered |= set(range(each.step, each.evidence["last_step"] + 1))
    assert covered == bad
    assert [each.step for each in found] == sorted(each.step for each in found)


def test_tensors_and_arrays_are_losses_too():
    values = [2.0, 1.9, 1.8, 30.0]
    for losses in (torch.tensor(values), [torch.tensor([value]) for value in values], np.float32(values), iter(values)):
        assert named(losses) == [(3, "spike")]


@pytest.mark.parametrize("wrong", ["2.0", None, [1.0], torch.ones(2)])
def test_what_is_no_number_is_refused_with_its_position(wrong):
    with pytest.raises(sf.UsageError, match=r"takes numbers; got .* at position 1"):
        sf.judge_losses([1.0, wrong])
