"""Columns of a table as arrays."""

import importlib.util

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forked
from surefoot.report.page.columns import (
    MOST_POINTS,
    SMOOTH_POINTS,
    by_part,
    coded,
    kept,
    kept_with,
    measured,
    smoothed,
    whole_numbers,
)
from watched import CLASSES, LOOP, NET


def test_null_is_nan_beside_a_mask():
    values, valid = measured(pa.table({"loss": [1.0, None, 3.0]}), "loss")
    assert valid.tolist() == [True, False, True]
    assert np.isnan(values[1])


def test_a_column_that_is_absent_or_empty_throughout_is_none():
    table = pa.table({"loss": pa.array([None, None], pa.float64())})
    assert measured(table, "loss") is None
    assert measured(table, "lr") is None


def test_words_are_numbered_by_first_appearance_in_a_plain_and_in_a_dictionary_column():
    words = ["b", None, "a", "b"]
    for column in (pa.array(words), pa.array(words).dictionary_encode()):
        codes, names = coded(pa.table({"layer": column}), "layer")
        assert [names[code] for code in codes] == ["b", "", "a", "b"]
        assert names == ["b", "", "a"]


def test_dictionaries_that_differ_between_chunks_are_joined():
    chunks = [pa.array(["x", "y"]).dictionary_encode(), pa.array(["y", "z"]).dictionary_encode()]
    codes, names = coded(pa.table({"layer": pa.chunked_array(chunks)}), "layer")
    assert [names[code] for code in codes] == ["x", "y", "y", "z"]


def test_parts_come_with_the_positions_of_their_rows():
    table = pa.table({"step": [0, 1, 2], "part": ["g", "d", "g"]})
    assert {part: rows.tolist() for part, rows in by_part(table)} == {"g": [0, 2], "d": [1]}
    assert [(part, rows.tolist()) for part, rows in by_part(table.select(["step"]))] == [("", [0, 1, 2])]
    assert list(by_part(pa.table({}))) == []
    assert whole_numbers(table, "step").tolist() == [0, 1, 2]


def test_a_report_is_made_without_pandas(watch):
    assert importlib.util.find_spec("pandas") is not None, "the test shows nothing where pandas is not installed"
    run = watch(CLASSES, "loss_of = F.cross_entropy", NET, LOOP)
    code = """
import sys
from surefoot.report.page.compare import write_comparison
from surefoot.report.page.html import write_report
assert "pandas" not in sys.modules, "the test shows nothing if it is there before"
assert '"layers"' in write_report("run", "page.html").read_text(), "a page without tables"
write_comparison(["run", "run"], "both.html")
sys.exit("pandas was imported" if "pandas" in sys.modules else None)
"""
    ended = forked.run(["-c", code], cwd=run.folder)
    assert ended.returncode == 0, ended.stderr


def test_a_short_series_is_kept_whole():
    assert kept(np.arange(MOST_POINTS, dtype=float)).tolist() == list(range(MOST_POINTS))


@pytest.mark.parametrize("count", [4_001, 50_000, 1_000_003])
def test_a_long_series_keeps_its_extremes_its_ends_and_the_limit(count):
    values = np.random.default_rng(0).normal(size=count)
    values[count // 3], values[count // 2] = 1e20, -1e20
    chosen = kept(values)
    assert {0, count // 3, count // 2, count - 1} <= set(chosen.tolist())
    assert len(chosen) <= MOST_POINTS + 2
    assert (np.diff(chosen) > 0).all()


def test_a_single_nan_or_inf_among_a_million_is_kept():
    values = np.zeros(1_000_000)
    values[123_456], values[777_777] = np.nan, np.inf
    assert {123_456, 777_777} <= set(kept(values).tolist())


@given(st.integers(4_001, 20_000), st.lists(st.integers(0, 20_000), max_size=20))
def test_every_step_at_which_something_happened_is_kept(count, events):
    steps = np.arange(count)
    chosen = kept_with(steps, np.sin(steps), events)
    assert {event for event in events if event < count} <= set(chosen.tolist())


def test_one_bad_value_does_not_bend_the_smoothed_line():
    values = np.full(1_000, 2.0)
    values[500], values[501] = 1e20, np.nan
    steps, line = smoothed(np.arange(1_000), values)
    assert np.allclose(line, 2.0)
    assert 501 not in steps


@pytest.mark.parametrize("count", [12, 100, 1_199, 1_201, 99_999, 1_000_000])
def test_a_smoothed_line_follows_its_series_at_any_length(count):
    values = np.linspace(5, 1, count)
    steps, line = smoothed(np.arange(count), values)
    assert len(steps) == len(line) <= SMOOTH_POINTS + 1
    late = line - values[steps]  # the line is of earlier values, which were higher
    assert late.min() >= -1e-9
    assert late.max() <= 4 * max(2 / count, 0.05)


@pytest.mark.parametrize("count", [200, 5_000, 1_000_000])
def test_a_smoothed_line_does_not_move_before_its_cause(count):
    steps = np.arange(count)
    jump = count * 2 // 3
    line_steps, line = smoothed(steps, np.where(steps < jump, 1.0, 9.0))
    assert np.all(line[line_steps < jump] == 1.0)
    assert line[-1] == 9.0


def test_a_handful_of_values_is_not_smoothed():
    assert len(smoothed(np.arange(5), np.arange(5.0))[0]) == 0


def test_the_line_begins_to_fall_with_its_values():
    values = np.linspace(4.0, 1.0, 200)
    _, line = smoothed(np.arange(200), values)
    assert line[0] == 4.0
    assert (np.diff(line) < 0).all()
    assert (line >= values).all()  # it follows: it never falls first
