import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import NAN, alarms, broken, flags, judge, steps
from surefoot import Signals

RULE = sf.LossStabilityMonitor(window_steps=16, every_steps=4)
noise = st.integers(0, 2**16).map(lambda seed: np.random.default_rng(seed).normal(size=64))


def losses(stream, first=0):
    return steps(first, loss=stream)


def statuses(stream, rule=RULE):
    return [verdict.evidence["status"] for verdict in judge(rule, losses(stream))[1]]


def diverging(level=1.0, by=1_000.0):
    """Quiet, then a rise that goes on."""
    quiet = level + 0.01 * np.random.default_rng(3).normal(size=32)
    return [*quiet, *(level + by * np.arange(1.0, 33.0))]


def test_until_the_window_is_full_the_data_is_insufficient():
    assert statuses([1.0] * 20) == ["insufficient_data"] * 15 + ["stable"] * 5


@pytest.mark.parametrize("level", [-100.0, -1.0, 0.0, 1.0, 100.0])
def test_a_loss_that_diverges_is_unstable_whatever_its_sign(level):
    found = statuses(diverging(level, by=10.0))
    assert "unstable" not in found[:32]
    assert "unstable" in found[32:]


@given(noise, st.integers(-1_000, 1_000))
def test_a_constant_added_to_the_loss_changes_no_status(wobble, shift):
    stream = np.round(diverging() + np.round(wobble * 64) / 64, 10)
    stream = np.round(stream * 64) / 64  # sixty-fourths: sums are exact
    assert statuses(stream + shift) == statuses(stream)


@given(noise)
def test_noise_that_crosses_zero_is_stable(wobble):
    assert set(statuses(wobble[:15])) == {"insufficient_data"}
    assert "unstable" not in statuses(wobble)


@given(st.lists(st.floats(0, 100), min_size=20, max_size=100), st.floats(-100, 100))
def test_a_loss_that_only_falls_is_never_unstable_however_fast(falls, start):
    stream = start - np.cumsum(falls)
    assert "unstable" not in statuses(stream)


def test_a_healthy_fast_drop_at_the_start_is_not_unstable():
    stream = 10.0 * np.exp(-np.arange(200) / 5) + 0.1 * np.random.default_rng(0).normal(size=200)
    assert "unstable" not in statuses(stream)
    assert "unstable" not in statuses(stream, sf.LossStabilityMonitor())


@given(st.floats(-1e6, 1e6), st.integers(1, 80))
def test_a_constant_stream_never_alarms(loss, count):
    assert "unstable" not in statuses([loss] * count)


@given(st.integers(0, 10**9))
def test_the_step_is_the_real_step_and_not_the_length_of_the_window(first):
    verdicts = judge(RULE, losses([1.0] * 40, first))[1]
    assert [verdict.evidence["step"] for verdict in verdicts] == list(range(first, first + 40))


@given(broken, st.integers(0, 39))
def test_one_nan_does_not_poison_the_baseline(bad, place):
    stream = [1.0, 1.5] * 20
    window = judge(RULE, losses(stream))[0].window
    state, verdicts = judge(RULE, losses([*stream[:place], bad, *stream[place:]]))
    assert state.window == window
    assert verdicts[-1].evidence["status"] == "stable"


def test_the_windows_mean_deviation_and_slope_come_with_the_verdict():
    stream = list(np.random.default_rng(1).normal(size=16))
    numbers = judge(RULE, losses(stream))[1][-1].evidence
    assert numbers["mean"] == pytest.approx(np.mean(stream))
    assert numbers["std"] == pytest.approx(np.std(stream))
    assert numbers["slope"] == pytest.approx(np.polyfit(np.arange(16.0), stream, 1)[0])


def test_a_rise_within_what_the_run_has_gained_is_left_alone():
    fall = list(np.linspace(100.0, 10.0, 64))
    assert "unstable" not in statuses([*fall, *[10.0] * 16, *[40.0] * 32])
    assert "unstable" in statuses([*fall, *[10.0] * 16, *[90.0] * 32])


def test_a_new_level_that_stays_becomes_stable_again():
    found = statuses([*[1.0] * 32, *[1_000.0] * 64])
    assert "unstable" in found
    assert found[-1] == "stable"


def test_a_slow_divergence_that_drowns_in_its_own_noise_is_a_warning():
    noisy = np.random.default_rng(2).lognormal(sigma=1.5, size=600)
    rising = sf.LossStabilityMonitor(runaway_factor=float("1e30")), sf.LossStabilityMonitor()
    stream = noisy * np.exp(np.arange(600) / 60)
    assert [bool(alarms(rule, losses(stream))) for rule in rising] == [False, True]
    assert not alarms(sf.LossStabilityMonitor(), losses(noisy))


def test_zeros_before_the_first_reward_are_no_scale_to_measure_a_rise_by():
    rewards = np.random.default_rng(4).exponential(size=400)
    assert not alarms(RULE, losses([*[0.0] * 300, *rewards]))
    assert statuses([0.0] * 40) == ["insufficient_data"] * 40


def test_a_rise_is_a_remark_and_a_divergence_is_a_warning():
    assert not alarms(RULE, losses([*[1.0] * 32, *[2.0] * 16]))
    assert any(flags(RULE, losses([*[1.0] * 32, *[2.0] * 16])))
    assert alarms(RULE, losses(diverging()))


def test_in_between_judgements_the_last_verdict_stands_with_its_severity():
    rule = sf.LossStabilityMonitor(window_steps=16, every_steps=8)
    verdicts = judge(rule, losses(diverging()))[1]
    first = next(i for i, verdict in enumerate(verdicts) if verdict.severity == "warning")
    for verdict in verdicts[first : first + 8]:
        assert verdict.anomalous
        assert verdict.severity == "warning"


def test_the_summary_says_by_how_much_the_loss_rose():
    verdict = next(verdict for verdict in judge(RULE, losses(diverging()))[1] if verdict.anomalous)
    assert verdict.summary.startswith("loss rose by ")
    assert "within 16 steps" in verdict.summary


def test_any_signal_can_be_watched():
    rule = sf.LossStabilityMonitor(window_steps=16, every_steps=4, signal="reward")
    stream = [Signals(i, loss=1.0, extra={"reward": value}) for i, value in enumerate(diverging())]
    assert any(flags(rule, stream))


@pytest.mark.parametrize("kind", [torch.tensor, np.float32, np.float64])
def test_a_loss_may_be_a_float_a_tensor_or_a_numpy_number(kind):
    stream = diverging()
    assert statuses([kind(value) for value in stream]) == statuses(stream)


def test_a_nan_before_the_window_is_full_delays_the_first_verdict():
    assert statuses([NAN, *[1.0] * 16]) == ["insufficient_data"] * 16 + ["stable"]
