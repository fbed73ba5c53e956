"""Every finite number has one bin, and the edges say which."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import patience
from histogram_bins import bin_of
from surefoot.record.bins import COUNT, EDGES, ZERO


def test_the_edges_increase_and_mirror_each_other():
    assert len(EDGES) == COUNT + 1 == 96
    assert all(low < high for low, high in itertools.pairwise(EDGES))
    assert list(EDGES) == [-edge for edge in reversed(EDGES)]
    assert EDGES[0] == -(2.0**16)
    assert EDGES[ZERO] < 0 < EDGES[ZERO + 1]


@given(st.floats(allow_nan=False, allow_infinity=False, width=64))
def test_a_number_lies_between_the_edges_of_its_bin(value):
    place = bin_of(value)
    low, high = EDGES[place], EDGES[place + 1]
    if value == 0:
        assert place == ZERO
    elif value > 0:
        assert low <= value
        assert value < high or place == COUNT - 1
    else:
        assert value <= high
        assert low < value or place == 0


@pytest.mark.parametrize("power", range(-30, 16))
def test_a_power_of_two_begins_its_own_bin(power):
    assert EDGES[bin_of(2.0**power)] == 2.0**power
    assert bin_of(math.nextafter(2.0**power, 0)) == bin_of(2.0**power) - 1
    assert bin_of(-(2.0**power)) == COUNT - 1 - bin_of(2.0**power)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_bin(value):
    assert bin_of(value) is None


def test_the_smallest_number_is_not_zero():
    assert bin_of(5e-324) == ZERO + 1
    assert bin_of(-5e-324) == ZERO - 1
    assert bin_of(-0.0) == ZERO


def test_a_reader_of_the_bins_needs_no_torch():
    code = "import sys; import surefoot.record.bins; assert not {'torch', 'numpy'} & set(sys.modules)"
    patience.run([sys.executable, "-c", code], check=True)
