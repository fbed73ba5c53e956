"""Numbers, times and strange strings as short text."""

import math

import pytest

from surefoot.report.terminal.formatting import age, as_ascii, clock, duration, number, one_line, pace, rate, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (0.0, "0"),
        (2.31415, "2.314"),
        (65536.0, "65536"),
        (1.2345e-5, "1.23e-5"),
        (123456.7, "1.23e5"),
        (1e300, "1.00e300"),
        (-0.5, "-0.5"),
    ],
)
def test_a_number_has_few_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (math.inf, "–"), (-3, "0s"), (59.9, "59s"), (187, "3:07"), (3753, "1:02:33"), (183_600, "2d 3h")],
)
def test_a_duration_is_readable_at_any_length(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (59.9, "59 s"), (60, "1 min"), (3_599, "59 min"), (7_300, "2 h"), (200_000, "2 d")],
)
def test_an_age_has_one_unit(seconds, text):
    assert age(seconds) == text


def test_slow_steps_are_given_by_the_time_of_one():
    assert pace(41.26) == "41.3 steps/s"
    assert pace(1 / 80) == "1:20 per step"
    assert pace(0.0) == "0 steps/s"
    assert (rate(3e-5), rate(None)) == ("3e-05", "–")


@pytest.mark.parametrize("time", [math.nan, math.inf, 1e300])
def test_a_time_that_no_calendar_has_is_dashes(time):
    assert clock(time) == "--:--:--"


def test_a_text_becomes_one_line_that_no_terminal_obeys():
    assert one_line("a\x1b[2J\nb\u202ec\ttail") == "a [2J b c tail"


def test_ascii_has_a_character_for_each_of_ours():
    assert as_ascii("1 × 2 · … – é") == "1 x 2 | ~ - ?"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1_000, "1 kB"), (71_136, "71.1 kB"), (999_600, "1 MB"), (1_400_000_000, "1.4 GB")],
)
def test_a_number_of_bytes_has_a_unit_and_three_digits(count, text):
    assert size(count) == text
