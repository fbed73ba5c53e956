"""The monitors that look back over many steps."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import surefoot as sf
from streams import INF, NAN, alarms, broken, flags, judge, loss_streams, steps
from surefoot import LayerStats, Signals
from surefoot.detect.monitors import autocorrelation, host_float, noise, pushed, spread, trend

# ---- statistics of a window -----------------------------------------------------------------------------------------


windows = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40).map(tuple)


@given(loss_streams(), st.integers(2, 20))
def test_a_window_holds_the_last_finite_values(stream, length):
    window = ()
    for loss in stream:
        window = pushed(window, loss, length)
    finite = [loss for loss in stream if np.isfinite(loss)]
    assert window == tuple(finite[-length:])


@pytest.mark.parametrize("value", [None, NAN, INF, -INF])
def test_what_is_not_finite_does_not_enter(value):
    assert pushed((1.0, 2.0), value, 2) == (1.0, 2.0)


@given(windows)
def test_noise_is_the_median_difference_over_that_of_a_normal(window):
    assert noise(window) == pytest.approx(np.median(np.abs(np.diff(window))) / (0.6745 * np.sqrt(2)))


def test_noise_of_white_noise_is_its_deviation():
    assert noise(tuple(np.random.default_rng(0).normal(size=4_000))) == pytest.approx(1.0, rel=0.05)


def test_noise_does_not_see_a_slow_trend():
    wobble = np.random.default_rng(0).normal(size=2_000)
    assert noise(tuple(wobble + 0.01 * np.arange(2_000))) == pytest.approx(noise(tuple(wobble)), rel=0.02)


@given(windows)
def test_spread_and_trend_are_those_of_numpy(window):
    slope, level = np.polyfit(np.arange(len(window)), window, 1)
    size = np.abs(window).max() + 1
    assert trend(window)[0] == pytest.approx(slope, abs=1e-9 * size)
    assert trend(window)[1] == pytest.approx(np.mean(window), abs=1e-9 * size)
    assert spread(window) == pytest.approx(np.std(window), abs=1e-9 * size)
    assert level == pytest.approx(trend(window)[1] - slope * (len(window) - 1) / 2, abs=1e-8 * size)


@given(windows)
def test_autocorrelation_lies_between_minus_1_and_1(window):
    assert -1 <= autocorrelation(window) <= 1


def test_autocorrelation_of_a_constant_and_of_a_line_is_0():
    assert autocorrelation((3.0,) * 8) == 0.0
    assert autocorrelation(tuple(range(8))) == 0.0


def test_one_value_has_no_noise():
    assert noise((1.0,)) == 0.0
    assert host_float(None) is None


# ---- LossStabilityMonitor -------------------------------------------------------------------------------------------


STABILITY_RULE = sf.LossStabilityMonitor(window_steps=16, every_steps=4)
stability_noise = st.integers(0, 2**16).map(lambda seed: np.random.default_rng(seed).normal(size=64))


def stability_losses(stream, first=0):
    return steps(first, loss=stream)


def statuses(stream, rule=STABILITY_RULE):
    return [verdict.evidence["status"] for verdict in judge(rule, stability_losses(stream))[1]]


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


@given(stability_noise, st.integers(-1_000, 1_000))
def test_a_constant_added_to_the_loss_changes_no_status(wobble, shift):
    stream = np.round(diverging() + np.round(wobble * 64) / 64, 10)
    stream = np.round(stream * 64) / 64  # sixty-fourths: sums are exact
    assert statuses(stream + shift) == statuses(stream)


@given(stability_noise)
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
def test_stability_a_constant_stream_never_alarms(loss, count):
    assert "unstable" not in statuses([loss] * count)


@given(st.integers(0, 10**9))
def test_the_step_is_the_real_step_and_not_the_length_of_the_window(first):
    verdicts = judge(STABILITY_RULE, stability_losses([1.0] * 40, first))[1]
    assert [verdict.evidence["step"] for verdict in verdicts] == list(range(first, first + 40))


@given(broken, st.integers(0, 39))
def test_stability_one_nan_does_not_poison_the_baseline(bad, place):
    stream = [1.0, 1.5] * 20
    window = judge(STABILITY_RULE, stability_losses(stream))[0].window
    state, verdicts = judge(STABILITY_RULE, stability_losses([*stream[:place], bad, *stream[place:]]))
    assert state.window == window
    assert verdicts[-1].evidence["status"] == "stable"


def test_the_windows_mean_deviation_and_slope_come_with_the_verdict():
    stream = list(np.random.default_rng(1).normal(size=16))
    numbers = judge(STABILITY_RULE, stability_losses(stream))[1][-1].evidence
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
    assert [bool(alarms(rule, stability_losses(stream))) for rule in rising] == [False, True]
    assert not alarms(sf.LossStabilityMonitor(), stability_losses(noisy))


def test_zeros_before_the_first_reward_are_no_scale_to_measure_a_rise_by():
    rewards = np.random.default_rng(4).exponential(size=400)
    assert not alarms(STABILITY_RULE, stability_losses([*[0.0] * 300, *rewards]))
    assert statuses([0.0] * 40) == ["insufficient_data"] * 40


def test_a_rise_is_a_remark_and_a_divergence_is_a_warning():
    assert not alarms(STABILITY_RULE, stability_losses([*[1.0] * 32, *[2.0] * 16]))
    assert any(flags(STABILITY_RULE, stability_losses([*[1.0] * 32, *[2.0] * 16])))
    assert alarms(STABILITY_RULE, stability_losses(diverging()))


def test_in_between_judgements_the_last_verdict_stands_with_its_severity():
    rule = sf.LossStabilityMonitor(window_steps=16, every_steps=8)
    verdicts = judge(rule, stability_losses(diverging()))[1]
    first = next(i for i, verdict in enumerate(verdicts) if verdict.severity == "warning")
    for verdict in verdicts[first : first + 8]:
        assert verdict.anomalous
        assert verdict.severity == "warning"


def test_the_summary_says_by_how_much_the_loss_rose():
    verdict = next(verdict for verdict in judge(STABILITY_RULE, stability_losses(diverging()))[1] if verdict.anomalous)
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


# ---- Oscillation ----------------------------------------------------------------------------------------------------


OSCILLATION_RULE = sf.Oscillation(window_steps=16, every_steps=4, times=2)


def oscillation_losses(stream):
    return steps(loss=stream)


def alternating(level, size, count):
    return [level + (size if i % 2 else -size) for i in range(count)]


@given(st.floats(-100, 100), st.floats(0.1, 10.0))
def test_a_loss_that_jumps_up_and_down_and_does_not_fall_is_an_alarm_at_any_level(level, share):
    size = share * max(abs(level), 1.0)
    found = flags(OSCILLATION_RULE, oscillation_losses(alternating(level, size, 40)))
    assert found.index(True) == 16 + 4 - 1
    assert all(found[19:])


def test_two_tasks_that_take_turns_are_a_remark_and_a_loss_that_bounces_above_its_start_is_a_warning():
    start = [2.0 + 0.01 * i for i in range(8)]
    assert not alarms(OSCILLATION_RULE, oscillation_losses(alternating(10.0, 3.0, 200)))
    assert alarms(OSCILLATION_RULE, oscillation_losses([*start, *alternating(10.0, 3.0, 40)]))


def test_the_alarm_says_by_how_much_and_around_what():
    verdict = judge(OSCILLATION_RULE, oscillation_losses(alternating(10.0, 3.0, 20)))[1][-1]
    assert verdict.severity == "info"
    assert verdict.evidence["jump"] == 6.0
    assert verdict.evidence["correlation"] < -0.9
    assert verdict.summary.startswith("loss alternates by 6 a step around")


def test_a_loss_that_jumps_but_falls_is_learning():
    stream = [value - 0.5 * i for i, value in enumerate(alternating(100.0, 2.0, 80))]
    assert not alarms(OSCILLATION_RULE, oscillation_losses(stream))


def test_jumps_that_are_small_beside_what_the_run_has_gained_are_no_alarm():
    fall = list(np.linspace(100.0, 10.0, 40))
    assert not any(flags(OSCILLATION_RULE, oscillation_losses([*fall, *alternating(10.0, 5.0, 80)])))
    assert any(flags(OSCILLATION_RULE, oscillation_losses([*fall, *alternating(10.0, 50.0, 80)])))


@given(st.integers(0, 2**16))
def test_white_noise_does_not_alternate(seed):
    stream = np.random.default_rng(seed).normal(size=200).tolist()
    assert not alarms(sf.Oscillation(), oscillation_losses(stream))


@given(st.floats(-1e6, 1e6), st.integers(1, 60))
def test_oscillation_a_constant_stream_never_alarms(loss, count):
    assert not alarms(OSCILLATION_RULE, oscillation_losses([loss] * count))


def test_it_must_hold_for_several_judgements():
    stream = alternating(10.0, 3.0, 24)  # judged at 16, 20 and 24 losses
    for times, held in ((1, True), (3, True), (4, False)):
        assert any(flags(sf.Oscillation(16, every_steps=4, times=times), oscillation_losses(stream))) == held


def test_a_nan_in_between_is_not_part_of_the_window():
    stream = alternating(10.0, 3.0, 40)
    with_nan = [*stream[:17], NAN, *stream[17:]]
    assert (
        judge(OSCILLATION_RULE, oscillation_losses(with_nan))[0].window
        == judge(OSCILLATION_RULE, oscillation_losses(stream))[0].window
    )
    assert any(flags(OSCILLATION_RULE, oscillation_losses(with_nan)))


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=30))
def test_autocorrelation_is_its_formula(values):
    x, y = np.arange(len(values), dtype=np.float64), np.array(values)
    rest = y - np.polyval(np.polyfit(x, y, 1), x)
    assume(np.abs(rest).max() > 1e-6)
    expected = (rest[1:] * rest[:-1]).sum() / (rest**2).sum()
    assert autocorrelation(tuple(values)) == pytest.approx(expected, abs=1e-6)


def test_rounding_noise_that_alternates_around_a_level_is_no_alarm():
    assert not any(flags(OSCILLATION_RULE, oscillation_losses(alternating(10.0, 0.01, 40))))
    assert any(flags(OSCILLATION_RULE, oscillation_losses(alternating(10.0, 0.2, 40))))


# ---- Plateau and NoLearning -----------------------------------------------------------------------------------------


PLATEAU_RULE = sf.Plateau(window_steps=16)
NEVER = sf.NoLearning(after_steps=40, window_steps=10)


def plateau_losses(stream, first=0):
    return steps(first, loss=stream)


# ---- Plateau --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [-5.0, 0.0, 3.0])
def test_a_loss_that_no_longer_falls_is_a_plateau_at_any_level(level):
    falling = level + 100 - np.arange(40.0)
    found = flags(PLATEAU_RULE, plateau_losses([*falling, *(falling[-1] + 0.01 * (-1.0) ** np.arange(64))]))
    assert not any(found[:40])
    assert found[-1]


@given(st.floats(0.01, 10.0), st.floats(-100, 100))
def test_a_loss_that_falls_is_on_no_plateau(slope, level):
    assert not any(flags(PLATEAU_RULE, plateau_losses([level - slope * i for i in range(80)])))


@given(loss_streams())
def test_it_is_a_remark_and_never_an_alarm(stream):
    assert not alarms(PLATEAU_RULE, plateau_losses(stream))


def test_the_remark_stands_until_the_next_judgement():
    found = flags(PLATEAU_RULE, plateau_losses([1.0] * 60))
    start = found.index(True)
    assert start == 15
    assert all(found[start:])


def test_a_plateau_ends_when_the_loss_falls_again():
    found = flags(PLATEAU_RULE, plateau_losses([*[1.0] * 32, *(1.0 - 0.1 * np.arange(32.0))]))
    assert found[31]
    assert not found[-1]


def test_a_plateau_is_one_incident_however_long_it_lasts():
    model = torch.nn.Linear(2, 1)
    checker = sf.StabilityChecker(plateau=PLATEAU_RULE, no_learning=None)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.0), checker=checker)
    for _ in range(100):
        stabilizer.backward(model(torch.ones(1, 2)).mean())
        stabilizer.step()
    assert [(incident.kind, incident.step) for incident in stabilizer.incidents] == [("plateau", 15)]


def test_the_evidence_is_the_gain_and_the_noise():
    verdict = judge(PLATEAU_RULE, plateau_losses([1.0, 2.0] * 8))[1][-1]
    assert verdict.evidence["steps"] == 8
    assert verdict.evidence["gain"] == 0.0
    assert verdict.evidence["noise"] == pytest.approx(1 / (0.6745 * np.sqrt(2)))


@given(st.integers(0, 15), st.sampled_from([NAN, INF, -INF]))
def test_plateau_one_nan_does_not_poison_the_baseline(place, bad):
    stream = [1.0] * 40
    state, _ = judge(PLATEAU_RULE, plateau_losses([*stream[:place], bad, *stream[place:]]))
    assert state.window == (1.0,) * 16


# ---- NoLearning -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 100), st.sampled_from([-3.0, 0.0, 5.0]))
def test_a_loss_that_never_left_its_first_level_is_remarked_after_a_while(seed, level):
    stream = level + np.random.default_rng(seed).normal(size=10) * 1e-3
    stream = [*stream, *(float(np.median(stream)) for _ in range(60))]
    found = flags(NEVER, plateau_losses(stream))
    assert not any(found[:40])
    assert all(found[40:])


def test_a_loss_that_fell_once_has_learned_for_good():
    falling = list(5.0 - 0.1 * np.arange(30.0))
    assert not any(flags(NEVER, plateau_losses([*falling, *[5.0] * 100])))


def test_learning_later_takes_the_remark_back():
    found = flags(NEVER, plateau_losses([*[5.0] * 60, *[1.0] * 40]))
    assert found[59]
    assert not found[-1]


def test_after_steps_counts_real_steps():
    assert flags(NEVER, plateau_losses([5.0] * 31, first=10))[-1]
    assert not any(flags(NEVER, plateau_losses([5.0] * 31)))


@given(st.integers(0, 59), st.sampled_from([NAN, INF, -INF]))
def test_a_broken_loss_is_neither_progress_nor_a_level(place, bad):
    stream = [5.0] * 80
    stream[place] = bad
    state, verdicts = judge(NEVER, plateau_losses(stream))
    assert verdicts[-1].anomalous
    assert set(state.first) | set(state.last) == {5.0}


def test_a_loss_that_was_not_measured_is_no_verdict():
    assert not any(flags(NEVER, [Signals(i) for i in range(100)]))


@given(loss_streams())
def test_no_learning_is_a_remark_and_never_an_alarm(stream):
    assert not alarms(NEVER, plateau_losses(stream))


# ---- Vanishing ------------------------------------------------------------------------------------------------------


def layers(norms, ranks=None, nonfinite=None):
    names = tuple(f"layer{i}" for i in range(len(norms)))
    zeros = [0.0] * len(norms)
    return LayerStats(
        names,
        tuple(ranks or [2] * len(norms)),
        torch.tensor(norms, dtype=torch.float64),
        torch.tensor(norms, dtype=torch.float64),
        torch.tensor(nonfinite or zeros),
    )


def verdicts(stream, rule):
    return judge(rule, [Signals(i, nonfinite=0.0, layers=layers(norms)) for i, norms in enumerate(stream)])[1]


def found(stream, rule):
    return [bool(verdict.anomalous) for verdict in verdicts(stream, rule)]


VANISHING_RULE = sf.Vanishing(ratio=1e-6, steps=3)
DEEP = [1e-9, 1e-5, 1e-3, 1.0]
FINE = [0.1, 0.5, 0.7, 1.0]


def test_it_needs_its_steps_in_a_row():
    assert found([DEEP, DEEP, DEEP, DEEP], VANISHING_RULE) == [False, False, True, True]
    assert found([DEEP, DEEP, FINE, DEEP, DEEP, DEEP], VANISHING_RULE) == [False] * 5 + [True]


def test_the_alarm_names_both_ends_and_their_ratio():
    last = verdicts([DEEP] * 3, VANISHING_RULE)[-1]
    assert last.summary == "gradient of layer0 is 1e-09 of that of layer3, for 3 steps"
    assert last.evidence == {"first": "layer0", "last": "layer3", "first_norm": 1e-9, "last_norm": 1.0, "steps": 3}


@given(st.floats(1e-9, 1.0))
def test_the_ratio_counts_and_not_the_size(scale):
    assert not any(found([[norm * scale for norm in FINE]] * 5, VANISHING_RULE))
    assert found([[norm * scale for norm in DEEP]] * 3, VANISHING_RULE)[-1]


def test_a_layer_whose_gradient_is_exactly_0_is_another_matter():
    assert not any(found([[0.0, 0.2, 0.5, 1.0]] * 5, VANISHING_RULE))


def test_biases_and_gains_are_not_compared():
    rows = layers([1e-12, 0.1, 0.5, 1.0], ranks=[1, 2, 2, 2])
    assert not any(v.anomalous for v in judge(VANISHING_RULE, [Signals(i, layers=rows) for i in range(5)])[1])


@pytest.mark.parametrize("norms", [[1e-12], [1e-12, 1.0]])
def test_a_shallow_model_has_no_first_and_last(norms):
    assert not any(found([norms] * 5, VANISHING_RULE))


def test_a_broken_step_neither_counts_nor_resets():
    broken = Signals(2, nonfinite=3.0, layers=layers([NAN, 1e-5, 1e-3, 1.0], nonfinite=[3.0, 0.0, 0.0, 0.0]))
    deep = Signals(0, nonfinite=0.0, layers=layers(DEEP))
    assert [v.anomalous for v in judge(VANISHING_RULE, [deep, deep, broken, deep])[1]] == [False, False, False, True]


def test_without_per_layer_norms_there_is_no_verdict():
    state, verdict = VANISHING_RULE.update(2, Signals(0, loss=1.0))
    assert state == 2
    assert not verdict.anomalous


# ---- ClippingSaturated ----------------------------------------------------------------------------------------------


CLIPPING_RULE = sf.ClippingSaturated(window_steps=10, share=0.5)
factor = st.sampled_from([1.0, 1.0, 0.5, 0.01])


def clips(stream):
    return steps(clip_factor=stream)


@given(st.lists(st.one_of(factor, st.sampled_from([NAN, INF])), min_size=20, max_size=60))
def test_it_counts_the_clipped_steps_of_the_last_window(stream):
    window, expected = [], []
    for value in stream:
        window = [*window, value][-10:] if value <= 1.0 else window
        expected.append(len(window) == 10 and sum(value < 1.0 for value in window) > 5)
    state, verdicts = judge(CLIPPING_RULE, clips(stream))
    assert [verdict.anomalous for verdict in verdicts] == expected
    assert state.clipped == sum(value < 1.0 for value in state.window)


def test_more_than_half_of_the_steps_clipped_is_reported_with_how_hard():
    verdict = judge(CLIPPING_RULE, clips([1.0] * 4 + [0.25] * 6))[1][-1]
    assert verdict.anomalous
    assert verdict.evidence == {"clipped": 6, "steps": 10, "typical_factor": 0.25}
    assert verdict.summary == "6 of the last 10 steps were clipped, typically to 0.25 of their size"


def test_exactly_half_is_not_more_than_half():
    assert not any(flags(CLIPPING_RULE, clips([1.0, 0.5] * 20)))


def test_it_is_a_remark_since_clipping_low_can_be_on_purpose():
    assert any(flags(CLIPPING_RULE, clips([0.5] * 20)))
    assert not alarms(CLIPPING_RULE, clips([0.5] * 20))


def test_it_ends_when_the_clipping_does():
    found = flags(CLIPPING_RULE, clips([0.5] * 20 + [1.0] * 20))
    assert found[19]
    assert not any(found[25:])


def test_a_run_that_is_never_clipped_is_healthy():
    assert not any(flags(sf.ClippingSaturated(), clips([1.0] * 300)))
