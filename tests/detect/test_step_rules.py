"""`NonFinite`, `Explosion`, `Spike`, `Setback` and `LostProgress`."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import INF, NAN, broken, flags, judge, loss_streams, norm_streams, norms, ordinary, same, steps
from surefoot import Signals
from surefoot.core.state_tree import pack
from surefoot.detect.step_rules import IQR_OF_NORMAL

# ---- NonFinite ------------------------------------------------------------------------------------------------------


def judged(**signals):
    return flags(sf.NonFinite(), [Signals(0, **signals)])[0]


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_a_broken_loss_is_anomalous_though_the_gradients_are_fine(loss):
    assert judged(loss=loss, grad_norm=1.0, nonfinite=0.0)


def test_a_rule_for_gradients_alone_leaves_the_loss_to_others():
    rule = sf.NonFinite(judges_loss=False)
    assert not rule.update((), Signals(0, loss=NAN, nonfinite=0.0))[1].anomalous
    assert rule.update((), Signals(0, loss=1.0, nonfinite=1.0))[1].anomalous
    assert repr(rule) == repr(sf.NonFinite())  # as saved states know it


def test_one_broken_entry_is_anomalous_though_the_loss_is_fine():
    assert judged(loss=1.0, grad_norm=NAN, nonfinite=1.0)


def test_a_norm_that_overflowed_with_every_entry_finite_is_left_to_explosion():
    assert not judged(loss=1.0, grad_norm=INF, nonfinite=0.0)


def test_without_a_count_the_norm_decides():
    assert judged(loss=1.0, grad_norm=NAN)
    assert judged(grad_norm=INF)
    assert not judged(grad_norm=1e30)


def test_what_was_not_measured_is_healthy():
    assert not judged()


def test_it_is_an_error_not_a_warning():
    _, verdict = sf.NonFinite().update((), Signals(0, loss=NAN))
    assert verdict.severity == "error"


@given(st.lists(st.one_of(ordinary, broken), max_size=40))
def test_each_step_is_judged_by_itself_and_the_next_healthy_one_is_healthy(losses):
    found = flags(sf.NonFinite(), [Signals(i, loss=loss, nonfinite=0.0) for i, loss in enumerate(losses)])
    assert found == [abs(loss) == INF or loss != loss for loss in losses]


@given(st.lists(st.tuples(st.one_of(ordinary, broken), st.integers(0, 3)), max_size=20))
def test_nonfinite_floats_and_tensors_give_the_same_verdicts(rows):
    floats = [Signals(0, loss=loss, nonfinite=float(count)) for loss, count in rows]
    tensors = [Signals(0, loss=torch.tensor(loss), nonfinite=torch.tensor(float(count))) for loss, count in rows]
    assert flags(sf.NonFinite(), floats) == flags(sf.NonFinite(), tensors)


# ---- Explosion ------------------------------------------------------------------------------------------------------


RULE = sf.Explosion(factor=10.0, min_steps=5, patience=3, half_life_steps=50.0)
explosion_healthy = st.lists(ordinary, min_size=5, max_size=30)


def explosion_reference(stream, rule):
    """The module's own words, in float64."""
    peak, accepted, refused, found = 0.0, 0, 0.0, []
    for norm in np.float64(stream):
        early = rule.early_factor * (rule.min_steps / max(accepted, 1)) ** 2
        factor = min(max(early, rule.factor), rule.early_factor)
        beyond = peak > 0 and accepted >= 3 and norm > factor * peak
        needed = 1 if rule.expects_levels and norm <= rule.early_factor * peak else 6
        level = refused >= needed and refused == int(refused)
        anomalous = norm > 1.8e19 or (beyond and refused < rule.patience and not level)
        if anomalous:
            refused += norm <= 1.8e19
        elif math.isfinite(norm):
            refused = 0.0 if beyond else max(refused - 0.05, 0.0)
            if norm > 0:
                fade = max(0.5 ** (1 / rule.half_life_steps), accepted / (accepted + 1))
                peak, accepted = max(peak * fade, norm), accepted + 1
        found.append(bool(anomalous))
    return found, peak


def explosion_norms(stream):
    return steps(grad_norm=stream)


@given(norm_streams(), st.booleans())
def test_explosion_it_is_its_formula(stream, expects_levels):
    rule = replace(RULE, expects_levels=expects_levels)
    expected, peak = explosion_reference(stream, rule)
    state, verdicts = judge(rule, explosion_norms(stream))
    assert [bool(verdict.anomalous) for verdict in verdicts] == expected
    assert float(state.peak) == pytest.approx(peak)


@given(explosion_healthy, st.floats(3e3, 1e30))
def test_an_explosion_is_seen_the_step_it_happens(history, size):
    assert flags(RULE, explosion_norms([*history, size])) == [False] * len(history) + [True]


@given(explosion_healthy, st.floats(3e3, 1e30))
def test_what_is_refused_does_not_raise_the_reference(history, size):
    state, _ = judge(RULE, explosion_norms(history))
    after, verdict = RULE.update(state, Signals(0, grad_norm=size))
    assert verdict.anomalous
    assert after.peak == state.peak
    assert after.accepted == state.accepted
    assert flags(RULE, explosion_norms([size, 1.0, size]), after) == [True, False, True]


@given(explosion_healthy)
def test_explosion_one_nan_does_not_poison_the_baseline(history):
    state, _ = judge(RULE, explosion_norms(history))
    after, verdict = RULE.update(state, Signals(0, grad_norm=NAN))
    assert not verdict.anomalous  # that is what NonFinite is for
    assert same(pack(after), pack(state))


@given(st.lists(st.one_of(ordinary, st.just(NAN)), max_size=4))
def test_a_norm_that_overflowed_fp32_is_anomalous_from_the_first_step(history):
    assert flags(RULE, explosion_norms([*history, INF]))[-1]


@given(explosion_healthy, st.integers(1, 6))
def test_explosion_a_new_level_that_stays_is_accepted_after_patience(history, patience):
    rule = sf.Explosion(factor=10.0, min_steps=5, patience=patience)
    found = flags(rule, explosion_norms([*history, *[1e4] * (patience + 20)]))
    assert found == [False] * len(history) + [True] * patience + [False] * 20


def test_a_new_level_of_the_norm_costs_one_step_and_a_single_explosion_is_refused_each_time():
    quiet, rule = [1.0] * 100, sf.Explosion(expects_levels=True)
    assert flags(rule, explosion_norms([*quiet, *[200.0, 90.0, 300.0] * 20]))[100:] == [True] + [False] * 59
    assert sum(flags(rule, explosion_norms([*quiet, 200.0] * 10))) == 10


def test_six_explosions_in_a_row_are_a_level_and_ten_with_healthy_steps_between_them():
    quiet = [1.0] * 100
    assert flags(sf.Explosion(), explosion_norms([*quiet, *[1e4] * 20]))[100:] == [True] * 6 + [False] * 14
    alternating = flags(sf.Explosion(), explosion_norms([*quiet, *[1e4, 1.0] * 20]))
    assert 10 <= sum(alternating) <= 12


@given(st.floats(0, 1e19), st.integers(1, 80))
def test_explosion_a_constant_stream_never_alarms(norm, count):
    assert not any(flags(RULE, explosion_norms([norm] * count)))


def test_gradients_that_were_all_zero_are_no_reference():
    assert not any(flags(RULE, explosion_norms([0.0] * 30 + [1.0])))


def test_a_hard_example_after_a_long_silence_is_no_explosion():
    rule, silence = sf.Explosion(), [0.0] * 40_000
    assert not any(flags(rule, explosion_norms([*[1.0, 1.5] * 100, *silence, 2.0])))
    solved = [1e-5] * 20_000
    assert not any(flags(rule, explosion_norms([*[1.0, 1.5] * 100, *solved, 1.0])))


def test_the_first_gradients_after_zeros_need_as_many_steps_as_a_fresh_run():
    assert not any(flags(RULE, explosion_norms([*[0.0] * 30, 1e-6, 1.0, 1e-3, 10.0])))


def test_what_keeps_coming_is_accepted_though_not_in_a_row_and_what_is_rare_never():
    often, rare = [1e4, *[1.0] * 9] * 20, [1e4, *[1.0] * 99] * 20
    rule = sf.Explosion(factor=10.0, min_steps=5, patience=3)
    assert sum(flags(rule, explosion_norms([*[1.0] * 20, *often]))) < 8
    assert sum(flags(rule, explosion_norms([*[1.0] * 20, *rare]))) == 20


def test_a_rough_start_is_forgotten():
    rule = sf.Explosion(factor=10.0, min_steps=5, half_life_steps=10.0)
    rough = [100.0] * 5
    assert not flags(rule, explosion_norms([*rough, 1.0, 500.0]))[-1]
    assert flags(rule, explosion_norms([*rough, *[1.0] * 100, 500.0]))[-1]


def test_before_min_steps_only_what_is_out_of_all_proportion_is_refused():
    assert not any(flags(RULE, explosion_norms([1.0, 1.0, 1.0, 999.0])))
    assert flags(RULE, explosion_norms([1.0, 1.0, 1.0, 1001.0])) == [False, False, False, True]
    assert not any(flags(RULE, explosion_norms([1.0, 1.0, 1e9])))


def test_a_short_record_may_be_exceeded_further_than_a_long_one():
    first_success = 300.0  # times the largest norm so far
    assert not any(flags(sf.Explosion(), explosion_norms([1.0] * 25 + [first_success])))
    assert flags(sf.Explosion(), explosion_norms([1.0] * 25 + [800.0]))[-1]
    assert flags(sf.Explosion(), explosion_norms([1.0] * 90 + [51.0]))[-1]


def test_a_gradient_no_larger_than_the_weights_is_no_explosion_however_unusual():
    quiet, first_reward = [1e-5] * 60, [2.0]
    assert flags(RULE, explosion_norms(quiet + first_reward))[-1]
    known = steps(grad_norm=quiet + first_reward, param_norm=[5.0] * 61)
    assert not any(flags(RULE, known))
    assert flags(RULE, steps(grad_norm=[*quiet, 6.0], param_norm=[5.0] * 61))[-1]


def test_any_signal_can_be_watched():
    rule = sf.Explosion(signal="entropy", min_steps=2)
    stream = [Signals(i, extra={"entropy": value}) for i, value in enumerate([1.0, 1.0, 1.0, 1e6])]
    assert flags(rule, stream) == [False, False, False, True]


def test_a_signal_that_was_not_measured_is_healthy_and_changes_nothing():
    state, _ = judge(RULE, explosion_norms([1.0] * 6))
    after, verdict = RULE.update(state, Signals(6))
    assert not verdict.anomalous
    assert same(pack(after), pack(state))


@given(norm_streams())
def test_explosion_floats_and_tensors_give_the_same_verdicts(stream):
    assert flags(RULE, explosion_norms(stream)) == flags(RULE, explosion_norms([torch.tensor(norm) for norm in stream]))


def test_norms_that_overflowed_do_not_make_a_level():
    stream = [1.0] * 10 + [INF] * 50 + [1e6]
    assert flags(RULE, explosion_norms(stream))[-51:] == [True] * 51


# ---- Spike ----------------------------------------------------------------------------------------------------------


ONE = sf.Spike(("loss",), window_steps=16, min_steps=6, patience=3, half_life_steps=50.0)
BOTH = sf.Spike(window_steps=16, min_steps=6, patience=3)
spike_healthy = st.lists(ordinary, min_size=6, max_size=30)


def spike_reference(stream, rule):
    """One signal of a rule, in the module's own words, in float64: is each value an outlier that is refused?"""
    window, accepted, furthest, highest, refused, found = [], 0, 0.0, 0.0, 0.0, []
    for value in np.float64(stream):
        low, median, high = _quartiles(window)
        spread = (high - low) / IQR_OF_NORMAL
        tail = min(max(math.sqrt(highest / max(spread, 1e-30)), 1.0), rule.max_tail_factor)
        bar = max(rule.threshold * spread, rule.factor * furthest, tail * highest, rule.min_rise * abs(median))
        outlier = bool(accepted >= rule.min_steps and math.isfinite(value) and value - median > bar)
        lasts = len(rule.signals) > 1 and refused > 0 and refused == int(refused)
        taken = math.isfinite(value) and (not outlier or lasts or refused >= rule.patience)
        if taken:
            distance = value - median if window else 0.0
            window, refused = [*window, value][-rule.window_steps :], 0.0 if outlier else max(refused - 0.001, 0.0)
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
def test_spike_it_is_its_formula(stream):
    assert flags(ONE, losses(stream)) == spike_reference(stream, ONE)


@given(spike_healthy, st.floats(1e2, 1e30), st.sampled_from([0.0, -1.25, -5.0, 3.0]))
def test_a_spike_is_seen_at_any_level_below_zero_and_across_it(history, size, shift):
    stream = [value + shift for value in history]
    assert flags(ONE, losses([*stream, size])) == [False] * len(stream) + [True]


@given(spike_healthy, st.floats(1e2, 1e30))
def test_a_sudden_fall_is_no_spike(history, size):
    assert not any(flags(ONE, losses([*history, -size])))


@given(spike_healthy, st.floats(1e2, 1e30))
def test_what_is_refused_enters_no_window(history, size):
    state, _ = judge(ONE, losses(history))
    after, verdict = ONE.update(state, Signals(0, loss=size))
    assert verdict.anomalous
    for part in ("window", "accepted", "furthest", "highest"):
        assert same(pack(getattr(after, part)), pack(getattr(state, part)))
    assert flags(ONE, losses([min(history), size]), after) == [False, True]


@given(spike_healthy, broken)
def test_spike_one_nan_does_not_poison_the_baseline(history, bad):
    state, _ = judge(ONE, losses(history))
    after, verdict = ONE.update(state, Signals(0, loss=bad))
    assert not verdict.anomalous  # that is what NonFinite is for
    assert same(pack(after), pack(state))
    assert flags(ONE, losses([min(history), 1e6]), after) == [False, True]


@given(spike_healthy)
def test_one_signal_alone_is_never_a_reason_to_act(history):
    quiet = [(value, value) for value in history]
    assert flags(BOTH, pairs([*quiet, (1e6, min(history)), (min(history), 1e6)])) == [False] * (len(history) + 2)
    assert flags(BOTH, pairs([*quiet, (1e6, 1e6)]))[-1]


@given(spike_healthy, st.integers(1, 6))
def test_spike_a_new_level_that_stays_is_accepted_after_patience(history, patience):
    rule = sf.Spike(("loss",), window_steps=16, min_steps=6, patience=patience)
    found = flags(rule, losses([*history, *[1e4] * (patience + 20)]))
    assert found == [False] * len(history) + [True] * patience + [False] * 20


@given(spike_healthy)
def test_a_new_level_of_several_signals_costs_one_step(history):
    level = [(value, value) for value in [*history, *[1e4] * 20]]
    assert flags(BOTH, pairs(level)) == [False] * len(history) + [True] + [False] * 19


@given(spike_healthy)
def test_single_bad_batches_are_refused_each_time_until_patience_ends(history):
    bad = [(value, value) for value in [*history, *[1e4, min(history)] * 6]]
    # A healthy step takes back a little, so it takes one refusal more than `patience`.
    assert flags(BOTH, pairs(bad))[len(history) :] == [True, False] * 4 + [False, False] * 2


@given(st.floats(-1e30, 1e30), st.integers(1, 40))
def test_spike_a_constant_stream_never_alarms(loss, count):
    assert not any(flags(ONE, losses([loss] * count)))


@given(st.floats(1e-3, 1e6), st.lists(st.floats(-1, 1), min_size=30, max_size=30))
def test_rounding_noise_around_a_constant_is_no_spike(level, noise):
    stream = [level] * 20 + [level * (1 + 1e-7 * wobble) for wobble in noise]
    assert not any(flags(ONE, losses(stream)))


@given(spike_healthy)
def test_a_run_with_heavy_tails_has_shown_them_before(history):
    tail = [1.0, 40.0, 1.0]
    early, late = [*history[:3], *tail, *[1.0] * 6], [60.0]
    assert not any(flags(ONE, losses(early + late)))


@pytest.mark.parametrize("tail", [1.0, 1.5, 2.0, 3.0])
def test_power_laws_are_hardly_ever_spikes(tail):
    stream = np.random.default_rng(7).random(5_000) ** (-1 / tail)
    assert sum(flags(sf.Spike(("loss",)), losses(stream))) <= 1


def test_zeros_are_no_baseline_for_the_first_real_value():
    rewards = np.where(np.arange(600) % 7 == 0, np.random.default_rng(5).exponential(size=600), 0.0)
    assert not any(flags(sf.Spike(("loss",)), losses([*[0.0] * 500, *rewards])))


def test_a_kept_margin_does_not_fade_what_the_run_has_shown():
    assert not any(flags(ONE, losses([*[1.0, 1.5, 0.0, 3.0] * 10, *[0.0] * 2_000, 3.0])))


def test_there_is_no_verdict_before_min_steps():
    assert not any(flags(ONE, losses([1.0] * 5 + [1e9])))


@pytest.mark.parametrize("missing", ["loss", "grad_norm"])
def test_a_signal_that_is_not_measured_means_no_verdict(missing):
    rows = [{"loss": 1.0, "grad_norm": 1.0}] * 10 + [{"loss": 1e9, "grad_norm": 1e9}]
    stream = [Signals(i, **{key: value for key, value in row.items() if key != missing}) for i, row in enumerate(rows)]
    assert not any(flags(BOTH, stream))


@given(loss_streams(max_size=60))
def test_spike_floats_and_tensors_give_the_same_verdicts(stream):
    assert flags(ONE, losses(stream)) == flags(ONE, losses([torch.tensor(loss) for loss in stream]))


@given(st.lists(st.tuples(ordinary, norms), min_size=15, max_size=40))
def test_both_signals_must_be_outliers_at_once(stream):
    found = flags(BOTH, pairs(stream))
    alone = [spike_reference(values, BOTH) for values in zip(*stream, strict=True)]
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


# ---- Setback --------------------------------------------------------------------------------------------------------


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


# ---- LostProgress ----------------------------------------------------------------------------------------------


def lost(losses, rule=sf.LostProgress(), on_device=False):  # noqa: B008 (frozen)
    """The steps at which the rule holds."""
    state, found = rule.init(), []
    for step, loss in enumerate(losses):
        value = torch.tensor(loss, dtype=torch.float32) if on_device else float(loss)
        state, verdict = rule.update(state, Signals(step, loss=value))
        if bool(verdict.anomalous):
            found.append(step)
    return found


def noisy_fall(steps, seed=0, noise=0.8, first=4.0, last=1.0):
    """A loss that falls under noise as large as most of what is gained, as that of small batches."""
    generator = np.random.default_rng(seed)
    level = last + (first - last) * np.exp(-np.arange(steps) / 60)
    return level * np.exp(noise * generator.standard_normal(steps) - noise**2 / 2)


@pytest.mark.parametrize("seed", range(10))
def test_damage_within_the_noise_of_single_losses_is_seen_in_their_mean(seed):
    losses = noisy_fall(400, seed)
    losses[300:] *= 3.0  # back to about where it began; single losses were as high before
    assert lost(losses[:300]) == []
    found = lost(losses)
    assert 300 < found[0] <= 332
    assert len([step for step in found if step < 350]) >= 10


def test_bad_batches_do_not_move_the_level():
    losses = noisy_fall(600, noise=0.1)
    losses[400:408:4] = 1e4
    assert lost(losses) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_heavy_tail_does_not_move_the_level_for_long_enough_to_matter(seed):
    tail = np.abs(np.random.default_rng(seed).standard_cauchy(2_000))  # which has no mean
    found = set(lost(2 + 3 * np.exp(-np.arange(2_000) / 60) + 0.3 * tail))
    recovery, state = sf.TrainingRecovery(), sf.TrainingRecovery().init()
    for step in range(2_000):
        state, decision = recovery.update(state, step, lost=step in found)
        assert decision.action == "none"


def test_a_very_high_first_loss_does_not_hide_moderate_damage():
    losses = noisy_fall(400, noise=0.1)
    losses[:4] = 300.0
    losses[300:] += 1.5
    found = lost(losses)
    assert found[0] < 310


def test_a_run_that_has_gained_nothing_has_nothing_to_lose():
    generator = np.random.default_rng(0)
    rising = 1 + np.arange(800) / 100 + 0.1 * generator.standard_normal(800)
    assert lost(rising) == []


def test_a_level_that_stays_is_accepted_as_the_new_one():
    losses = noisy_fall(900, noise=0.1)
    losses[300:] += 2.0
    found = lost(losses)
    rule = sf.LostProgress()
    longest = rule.block_steps * rule.longer * (rule.accept_after + rule.blocks)
    assert found[0] < 310
    assert found[-1] < 300 + longest


def test_the_level_is_the_same_on_the_device():
    losses = noisy_fall(400)
    losses[300:] *= 3.0
    assert lost(losses, on_device=True) == lost(losses)


def test_losses_that_are_not_finite_change_nothing():
    losses = noisy_fall(400)
    losses[300:] *= 3.0
    broken = np.insert(losses, 200, [np.nan, np.inf, -np.inf])
    assert [step - 3 for step in lost(broken)] == lost(losses)


def test_the_count_of_losses_stays_far_from_where_fp32_stops_counting():
    rule, counts = sf.LostProgress(), []
    state = rule.init()
    for step, loss in enumerate(noisy_fall(400)):
        state, _ = rule.update(state, Signals(step, loss=torch.tensor(loss, dtype=torch.float32)))
        counts.append(float(state.seen))
    assert max(counts) < 100
    assert len(set(counts[-32:])) == 32
