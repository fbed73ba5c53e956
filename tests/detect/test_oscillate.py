import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import surefoot as sf
from streams import NAN, alarms, flags, judge, steps
from surefoot.detect.windows import autocorrelation

RULE = sf.Oscillation(window_steps=16, every_steps=4, times=2)


def losses(stream):
    return steps(loss=stream)


def alternating(level, size, count):
    return [level + (size if i % 2 else -size) for i in range(count)]


@given(st.floats(-100, 100), st.floats(0.1, 10.0))
def test_a_loss_that_jumps_up_and_down_and_does_not_fall_is_an_alarm_at_any_level(level, share):
    size = share * max(abs(level), 1.0)
    found = flags(RULE, losses(alternating(level, size, 40)))
    assert found.index(True) == 16 + 4 - 1
    assert all(found[19:])


def test_two_tasks_that_take_turns_are_a_remark_and_a_loss_that_bounces_above_its_start_is_a_warning():
    start = [2.0 + 0.01 * i for i in range(8)]
    assert not alarms(RULE, losses(alternating(10.0, 3.0, 200)))
    assert alarms(RULE, losses([*start, *alternating(10.0, 3.0, 40)]))


def test_the_alarm_says_by_how_much_and_around_what():
    verdict = judge(RULE, losses(alternating(10.0, 3.0, 20)))[1][-1]
    assert verdict.severity == "info"
    assert verdict.evidence["jump"] == 6.0
    assert verdict.evidence["correlation"] < -0.9
    assert verdict.summary.startswith("loss alternates by 6 a step around")


def test_a_loss_that_jumps_but_falls_is_learning():
    stream = [value - 0.5 * i for i, value in enumerate(alternating(100.0, 2.0, 80))]
    assert not alarms(RULE, losses(stream))


def test_jumps_that_are_small_beside_what_the_run_has_gained_are_no_alarm():
    fall = list(np.linspace(100.0, 10.0, 40))
    assert not any(flags(RULE, losses([*fall, *alternating(10.0, 5.0, 80)])))
    assert any(flags(RULE, losses([*fall, *alternating(10.0, 50.0, 80)])))


@given(st.integers(0, 2**16))
def test_white_noise_does_not_alternate(seed):
    stream = np.random.default_rng(seed).normal(size=200).tolist()
    assert not alarms(sf.Oscillation(), losses(stream))


@given(st.floats(-1e6, 1e6), st.integers(1, 60))
def test_a_constant_stream_never_alarms(loss, count):
    assert not alarms(RULE, losses([loss] * count))


def test_it_must_hold_for_several_judgements():
    stream = alternating(10.0, 3.0, 24)  # judged at 16, 20 and 24 losses
    for times, held in ((1, True), (3, True), (4, False)):
        assert any(flags(sf.Oscillation(16, every_steps=4, times=times), losses(stream))) == held


def test_a_nan_in_between_is_not_part_of_the_window():
    stream = alternating(10.0, 3.0, 40)
    with_nan = [*stream[:17], NAN, *stream[17:]]
    assert judge(RULE, losses(with_nan))[0].window == judge(RULE, losses(stream))[0].window
    assert any(flags(RULE, losses(with_nan)))


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=30))
def test_autocorrelation_is_its_formula(values):
    x, y = np.arange(len(values), dtype=np.float64), np.array(values)
    rest = y - np.polyval(np.polyfit(x, y, 1), x)
    assume(np.abs(rest).max() > 1e-6)
    expected = (rest[1:] * rest[:-1]).sum() / (rest**2).sum()
    assert autocorrelation(tuple(values)) == pytest.approx(expected, abs=1e-6)


def test_rounding_noise_that_alternates_around_a_level_is_no_alarm():
    assert not any(flags(RULE, losses(alternating(10.0, 0.01, 40))))
    assert any(flags(RULE, losses(alternating(10.0, 0.2, 40))))
