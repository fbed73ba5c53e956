"""The curve in a line: the shape survives a NaN, a spike, a long run, a resume."""

import math

from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.sparkline import SLOTS, SparkCurve, sparkline


def drawn(values, width=40, ascii_only=False):
    curve = SparkCurve()
    for step, value in enumerate(values):
        curve.add(step, value)
    return sparkline(curve.slots(width), ascii_only)


def test_a_falling_loss_falls():
    curve = drawn([8.0 - step for step in range(8)])
    assert curve == "█▇▆▅▄▃▂▁"


def test_one_spike_is_an_arrow_and_the_rest_keeps_its_shape():
    values = [8.0 - 0.1 * step for step in range(40)]
    calm = drawn(values)
    values[20] = 1e20
    assert drawn(values) == calm[:20] + "↑" + calm[21:]


def test_a_spike_stays_off_the_scale_when_its_slot_holds_many_steps():
    values = [2.0 + math.sin(step / 100) for step in range(10_000)]
    values[5000] = 1e20
    curve = drawn(values)
    assert curve.count("↑") == 1
    assert set(curve) >= set("▁▄█")


def test_a_steep_start_is_no_spike():
    assert "↑" not in drawn([4 * math.exp(-step / 20) for step in range(100)])
    assert "↑" not in drawn([3 / (step + 1) for step in range(300)])


def test_what_is_not_finite_is_a_cross_and_leaves_no_trace_in_its_neighbours():
    assert drawn([1.0, math.nan, 2.0, math.inf, 1.0]) == "▁×█×▁"
    assert drawn([math.nan]) == "×"


def test_a_constant_is_a_level_line():
    assert drawn([3.0] * 5) == "▄" * 5


def test_a_long_run_keeps_its_beginning_in_a_fixed_size():
    curve = SparkCurve()
    for step in range(100_000):
        curve.add(step, 9.0 if step < 10_000 else 1.0)
    assert len(curve._slots) <= SLOTS
    assert sparkline(curve.slots(10)) == "██" + "▁" * 8


def test_a_thinned_log_has_the_same_shape():
    full, thinned = SparkCurve(), SparkCurve()
    for step in range(1000):
        full.add(step, 10.0 - step // 100)
        if step > 500 or step % 10 == 0:
            thinned.add(step, 10.0 - step // 100)
    assert sparkline(full.slots(10)) == sparkline(thinned.slots(10)) == "██▇▆▅▄▃▂▁▁"


def test_what_lies_behind_replaces_what_came_after():
    curve = SparkCurve()
    for step, value in [(0, 1.0), (1, 2.0), (2, 3.0), (3, 9.0), (1, 2.0)]:
        curve.add(step, value)
    assert sparkline(curve.slots(10)) == "▁█"


@given(st.lists(st.tuples(st.integers(0, 2**62), st.floats()), max_size=300), st.integers(1, 200), st.booleans())
def test_any_stream_is_drawn_within_the_width(values, width, ascii_only):
    curve = SparkCurve()
    for step, value in values:
        curve.add(step, value)
    line = sparkline(curve.slots(width), ascii_only)
    assert len(line) <= width
    assert line.isascii() or not ascii_only
