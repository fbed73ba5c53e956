import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import INF, NAN, loss_streams
from surefoot.detect.windows import autocorrelation, host_float, noise, pushed, spread, trend

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
