import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import INF, NAN, flags, judge, norm_streams, ordinary, same, steps
from surefoot import Signals
from surefoot.core.state_tree import pack

RULE = sf.Explosion(factor=10.0, min_steps=5, patience=3, half_life_steps=50.0)
healthy = st.lists(ordinary, min_size=5, max_size=30)


def reference(stream, rule):
    """The module's own words, in float64."""
    peak, accepted, refused, found = 0.0, 0, 0.0, []
    for norm in np.float64(stream):
        factor = rule.factor if accepted >= rule.min_steps else rule.early_factor
        beyond = peak > 0 and accepted >= 3 and norm > factor * peak
        anomalous = norm > 1.8e19 or (beyond and refused < rule.patience)
        if anomalous:
            refused += norm <= 1.8e19
        elif math.isfinite(norm):
            refused = 0.0 if beyond else max(refused - 0.05, 0.0)
            if norm > 0:
                fade = max(0.5 ** (1 / rule.half_life_steps), accepted / (accepted + 1))
                peak, accepted = max(peak * fade, norm), accepted + 1
        found.append(bool(anomalous))
    return found, peak


def norms(stream):
    return steps(grad_norm=stream)


@given(norm_streams())
def test_it_is_its_formula(stream):
    expected, peak = reference(stream, RULE)
    state, verdicts = judge(RULE, norms(stream))
    assert [bool(verdict.anomalous) for verdict in verdicts] == expected
    assert float(state.peak) == pytest.approx(peak)


@given(healthy, st.floats(1e3, 1e30))
def test_an_explosion_is_seen_the_step_it_happens(history, size):
    assert flags(RULE, norms([*history, size])) == [False] * len(history) + [True]


@given(healthy, st.floats(1e3, 1e30))
def test_what_is_refused_does_not_raise_the_reference(history, size):
    state, _ = judge(RULE, norms(history))
    after, verdict = RULE.update(state, Signals(0, grad_norm=size))
    assert verdict.anomalous
    assert after.peak == state.peak
    assert after.accepted == state.accepted
    assert flags(RULE, norms([size, 1.0, size]), after) == [True, False, True]


@given(healthy)
def test_one_nan_does_not_poison_the_baseline(history):
    state, _ = judge(RULE, norms(history))
    after, verdict = RULE.update(state, Signals(0, grad_norm=NAN))
    assert not verdict.anomalous  # that is what NonFinite is for
    assert same(pack(after), pack(state))


@given(st.lists(st.one_of(ordinary, st.just(NAN)), max_size=4))
def test_a_norm_that_overflowed_fp32_is_anomalous_from_the_first_step(history):
    assert flags(RULE, norms([*history, INF]))[-1]


@given(healthy, st.integers(1, 6))
def test_a_new_level_that_stays_is_accepted_after_patience(history, patience):
    rule = sf.Explosion(factor=10.0, min_steps=5, patience=patience)
    found = flags(rule, norms([*history, *[1e4] * (patience + 20)]))
    assert found == [False] * len(history) + [True] * patience + [False] * 20


@given(st.floats(0, 1e19), st.integers(1, 80))
def test_a_constant_stream_never_alarms(norm, count):
    assert not any(flags(RULE, norms([norm] * count)))


def test_gradients_that_were_all_zero_are_no_reference():
    assert not any(flags(RULE, norms([0.0] * 30 + [1.0])))


def test_a_hard_example_after_a_long_silence_is_no_explosion():
    rule, silence = sf.Explosion(), [0.0] * 40_000
    assert not any(flags(rule, norms([*[1.0, 1.5] * 100, *silence, 2.0])))
    solved = [1e-5] * 20_000
    assert not any(flags(rule, norms([*[1.0, 1.5] * 100, *solved, 1.0])))


def test_the_first_gradients_after_zeros_need_as_many_steps_as_a_fresh_run():
    assert not any(flags(RULE, norms([*[0.0] * 30, 1e-6, 1.0, 1e-3, 10.0])))


def test_what_keeps_coming_is_accepted_though_not_in_a_row_and_what_is_rare_never():
    often, rare = [1e4, *[1.0] * 9] * 20, [1e4, *[1.0] * 99] * 20
    rule = sf.Explosion(factor=10.0, min_steps=5, patience=3)
    assert sum(flags(rule, norms([*[1.0] * 20, *often]))) < 8
    assert sum(flags(rule, norms([*[1.0] * 20, *rare]))) == 20


def test_a_rough_start_is_forgotten():
    rule = sf.Explosion(factor=10.0, min_steps=5, half_life_steps=10.0)
    rough = [100.0] * 5
    assert not flags(rule, norms([*rough, 1.0, 500.0]))[-1]
    assert flags(rule, norms([*rough, *[1.0] * 100, 500.0]))[-1]


def test_before_min_steps_only_what_is_out_of_all_proportion_is_refused():
    assert not any(flags(RULE, norms([1.0, 1.0, 1.0, 999.0])))
    assert flags(RULE, norms([1.0, 1.0, 1.0, 1001.0])) == [False, False, False, True]
    assert not any(flags(RULE, norms([1.0, 1.0, 1e9])))


def test_a_gradient_no_larger_than_the_weights_is_no_explosion_however_unusual():
    quiet, first_reward = [1e-5] * 60, [2.0]
    assert flags(RULE, norms(quiet + first_reward))[-1]
    known = steps(grad_norm=quiet + first_reward, param_norm=[5.0] * 61)
    assert not any(flags(RULE, known))
    assert flags(RULE, steps(grad_norm=[*quiet, 6.0], param_norm=[5.0] * 61))[-1]


def test_any_signal_can_be_watched():
    rule = sf.Explosion(signal="entropy", min_steps=2)
    stream = [Signals(i, extra={"entropy": value}) for i, value in enumerate([1.0, 1.0, 1.0, 1e6])]
    assert flags(rule, stream) == [False, False, False, True]


def test_a_signal_nobody_measured_is_healthy_and_changes_nothing():
    state, _ = judge(RULE, norms([1.0] * 6))
    after, verdict = RULE.update(state, Signals(6))
    assert not verdict.anomalous
    assert same(pack(after), pack(state))


@given(norm_streams())
def test_floats_and_tensors_give_the_same_verdicts(stream):
    assert flags(RULE, norms(stream)) == flags(RULE, norms([torch.tensor(norm) for norm in stream]))


def test_norms_that_overflowed_do_not_make_a_level():
    stream = [1.0] * 10 + [INF] * 50 + [1e6]
    assert flags(RULE, norms(stream))[-51:] == [True] * 51
