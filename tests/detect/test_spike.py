import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import INF, NAN, broken, flags, judge, loss_streams, norms, ordinary, same, steps
from surefoot import Signals
from surefoot.core.state_tree import pack
from surefoot.detect.spike import IQR_OF_NORMAL

ONE = sf.Spike(("loss",), window_steps=16, min_steps=6, patience=3, half_life_steps=50.0)
BOTH = sf.Spike(window_steps=16, min_steps=6, patience=3)
healthy = st.lists(ordinary, min_size=6, max_size=30)


def reference(stream, rule):
    """One signal, in the module's own words, in float64: is each value an outlier that is refused?"""
    window, accepted, furthest, highest, refused, found = [], 0, 0.0, 0.0, 0.0, []
    for value in np.float64(stream):
        low, median, high = _quartiles(window)
        spread = (high - low) / IQR_OF_NORMAL
        tail = min(max(math.sqrt(highest / max(spread, 1e-30)), 1.0), rule.max_tail_factor)
        bar = max(rule.threshold * spread, rule.factor * furthest, tail * highest, rule.min_rise * abs(median))
        outlier = bool(accepted >= rule.min_steps and math.isfinite(value) and value - median > bar)
        taken = math.isfinite(value) and (not outlier or refused >= rule.patience)
        if taken:
            distance = value - median if window else 0.0
            window, refused = [*window, value][-rule.window_steps :], 0.0 if outlier else max(refused - 0.05, 0.0)
            if value != 0:
                fade = max(0.5 ** (1 / rule.half_life_steps), accepted / (accepted + 1))
                furthest, highest = max(furthest * fade, abs(distance)), max(highest * fade, distance)
                accepted += 1
        else:
            refused += outlier
        found.append(outlier and not taken)
    return found


def _quartiles(window):
    if not window:
        return 0.0, 0.0, 0.0
    return [sorted(window)[round((len(window) - 1) * quarter)] for quarter in (0.25, 0.5, 0.75)]


def losses(stream):
    return steps(loss=stream)


def pairs(stream):
    return steps(loss=[loss for loss, _ in stream], grad_norm=[norm for _, norm in stream])


@given(
    st.lists(
        st.one_of(ordinary, st.floats(-2, 2, width=32), broken, st.just(1e6), st.just(-1e3)), min_size=30, max_size=100
    )
)
def test_it_is_its_formula(stream):
    assert flags(ONE, losses(stream)) == reference(stream, ONE)


@given(healthy, st.floats(1e2, 1e30), st.sampled_from([0.0, -1.25, -5.0, 3.0]))
def test_a_spike_is_seen_at_any_level_below_zero_and_across_it(history, size, shift):
    stream = [value + shift for value in history]
    assert flags(ONE, losses([*stream, size])) == [False] * len(stream) + [True]


@given(healthy, st.floats(1e2, 1e30))
def test_a_sudden_fall_is_no_spike(history, size):
    assert not any(flags(ONE, losses([*history, -size])))


@given(healthy, st.floats(1e2, 1e30))
def test_what_is_refused_enters_no_window(history, size):
    state, _ = judge(ONE, losses(history))
    after, verdict = ONE.update(state, Signals(0, loss=size))
    assert verdict.anomalous
    for part in ("window", "accepted", "furthest", "highest"):
        assert same(pack(getattr(after, part)), pack(getattr(state, part)))
    assert flags(ONE, losses([min(history), size]), after) == [False, True]


@given(healthy, broken)
def test_one_nan_does_not_poison_the_baseline(history, bad):
    state, _ = judge(ONE, losses(history))
    after, verdict = ONE.update(state, Signals(0, loss=bad))
    assert not verdict.anomalous  # that is what NonFinite is for
    assert same(pack(after), pack(state))
    assert flags(ONE, losses([min(history), 1e6]), after) == [False, True]


@given(healthy)
def test_one_signal_alone_is_never_a_reason_to_act(history):
    quiet = [(value, value) for value in history]
    assert flags(BOTH, pairs([*quiet, (1e6, min(history)), (min(history), 1e6)])) == [False] * (len(history) + 2)
    assert flags(BOTH, pairs([*quiet, (1e6, 1e6)]))[-1]


@given(healthy, st.integers(1, 6))
def test_a_new_level_that_stays_is_accepted_after_patience(history, patience):
    rule = sf.Spike(("loss",), window_steps=16, min_steps=6, patience=patience)
    found = flags(rule, losses([*history, *[1e4] * (patience + 20)]))
    assert found == [False] * len(history) + [True] * patience + [False] * 20


@given(st.floats(-1e30, 1e30), st.integers(1, 40))
def test_a_constant_stream_never_alarms(loss, count):
    assert not any(flags(ONE, losses([loss] * count)))


@given(st.floats(1e-3, 1e6), st.lists(st.floats(-1, 1), min_size=30, max_size=30))
def test_rounding_noise_around_a_constant_is_no_spike(level, noise):
    stream = [level] * 20 + [level * (1 + 1e-7 * wobble) for wobble in noise]
    assert not any(flags(ONE, losses(stream)))


@given(healthy)
def test_a_run_with_heavy_tails_has_shown_them_before(history):
    tail = [1.0, 40.0, 1.0]
    early, late = [*history[:3], *tail, *[1.0] * 6], [60.0]
    assert not any(flags(ONE, losses(early + late)))


@pytest.mark.parametrize("tail", [1.0, 1.5, 2.0, 3.0])
def test_power_laws_are_hardly_ever_spikes(tail):
    stream = np.random.default_rng(7).random(10_000) ** (-1 / tail)
    assert sum(flags(sf.Spike(("loss",)), losses(stream))) <= 1


def test_zeros_are_no_baseline_for_the_first_real_value():
    rewards = np.where(np.arange(600) % 7 == 0, np.random.default_rng(5).exponential(size=600), 0.0)
    assert not any(flags(sf.Spike(("loss",)), losses([*[0.0] * 500, *rewards])))


def test_a_kept_margin_does_not_fade_what_the_run_has_shown():
    assert not any(flags(ONE, losses([*[1.0, 1.5, 0.0, 3.0] * 10, *[0.0] * 2_000, 3.0])))


def test_there_is_no_verdict_before_min_steps():
    assert not any(flags(ONE, losses([1.0] * 5 + [1e9])))


@pytest.mark.parametrize("missing", ["loss", "grad_norm"])
def test_a_signal_nobody_measures_means_no_verdict(missing):
    rows = [{"loss": 1.0, "grad_norm": 1.0}] * 10 + [{"loss": 1e9, "grad_norm": 1e9}]
    stream = [Signals(i, **{key: value for key, value in row.items() if key != missing}) for i, row in enumerate(rows)]
    assert not any(flags(BOTH, stream))


@given(loss_streams(max_size=60))
def test_floats_and_tensors_give_the_same_verdicts(stream):
    assert flags(ONE, losses(stream)) == flags(ONE, losses([torch.tensor(loss) for loss in stream]))


@given(st.lists(st.tuples(ordinary, norms), min_size=15, max_size=40))
def test_both_signals_must_be_outliers_at_once(stream):
    found = flags(BOTH, pairs(stream))
    alone = [flags(sf.Spike((name,), 16, min_steps=6, patience=3), pairs(stream)) for name in BOTH.signals]
    assert found == [a and b for a, b in zip(*alone, strict=True)]


def test_a_nan_in_the_middle_of_refusals_does_not_reset_the_count():
    assert flags(ONE, losses([1.0, 1.1] * 5 + [1e6, NAN, 1e6, INF, 1e6, 1e6]))[10:] == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]
