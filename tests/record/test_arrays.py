"""Arrow arrays are made and read without pandas."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forked
from surefoot.record.arrays import column_values, floats, from_numpy, from_words, numbers, to_numpy, words

KINDS = (np.int32, np.int64, np.float32, np.float64)


@given(st.lists(st.one_of(st.none(), st.integers(-1000, 1000))), st.sampled_from(KINDS), st.integers(0, 9))
def test_numbers_are_what_they_were_and_missing_ones_are_null(values, kind, cut):
    missing = np.array([value is None for value in values], dtype=bool)
    array = from_numpy(np.array([value or 0 for value in values], dtype=kind), missing)
    array.validate(full=True)
    assert array.to_pylist() == values
    assert to_numpy(array[cut:], null=-7).tolist() == [-7 if value is None else value for value in values[cut:]]


@given(st.lists(st.booleans()))
def test_flags_are_what_they_were(flags):
    array = from_numpy(np.array(flags, dtype=bool))
    array.validate(full=True)
    assert array.to_pylist() == flags


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_words_are_what_they_were(words):
    array = from_words(words)
    array.validate(full=True)
    assert array.to_pylist() == words


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_a_value(value):
    array = from_numpy(np.array([value], dtype=np.float32))
    assert array.null_count == 0
    np.testing.assert_equal(to_numpy(array, null=0), np.array([value], dtype=np.float32))


def test_a_log_is_written_and_thinned_without_pandas(tmp_path):
    assert importlib.util.find_spec("pandas") is not None, "the test shows nothing where pandas is not installed"
    code = """
import sys
from pathlib import Path

from runlogs import event, layer_rows, step_row
from surefoot.record.limits import LogLimits
from surefoot.record.messages import Batch, DeviceRow
from surefoot.record.segments import segments_in
from surefoot.record.store import Store

assert "pandas" not in sys.modules, "the test shows nothing if it is there before"
store = Store(Path("run"), LogLimits(1 << 19, 1 << 19, 1 << 19, 1 << 19))
for start in range(0, 10_000, 1000):
    here = range(start, start + 1000)
    layers = [layer_rows(step, 8) for step in here if step % 4 == 0]
    devices = [DeviceRow(float(step), "host", step, {"used": 1.0}) for step in here]
    assert store.write(Batch([*map(step_row, here)], layers, (), devices, [event(start)])).error is None
store.close()
assert any(name.level == "1" for name in segments_in(Path("run"))), "nothing was thinned"
sys.exit("pandas was imported" if "pandas" in sys.modules else None)
"""
    path = os.pathsep.join((forked.SOURCE, str(Path(__file__).parents[1])))
    run = forked.run(["-c", code], cwd=tmp_path, env=forked.environment(PYTHONPATH=path))
    assert run.returncode == 0, run.stderr


def table():
    return pa.table({"step": pa.array([3, None, 5]), "part": pa.array(["b", "a", "b"]).dictionary_encode()})


def test_numbers_are_the_values_and_null_is_minus_one():
    assert numbers(table(), "step").tolist() == [3, -1, 5]


def test_words_are_numbered_in_the_order_of_their_dictionary():
    assert numbers(table(), "part").tolist() == [0, 1, 0]
    assert words(table(), "part") == ["b", "a"]


def test_a_column_in_several_chunks_is_one_array():
    joined = pa.concat_tables([table(), table()])
    assert numbers(joined, "step").tolist() == [3, -1, 5, 3, -1, 5]


def test_a_table_without_rows_has_no_numbers_and_no_words():
    empty = pa.chunked_array([], type=pa.int64())
    rows = pa.table({"step": empty, "part": empty})
    assert np.array_equal(numbers(rows, "step"), [])
    assert words(rows, "part") == []


def test_flags_and_numbers_of_a_column_with_nulls_in_several_chunks():
    flags = pa.chunked_array([[True, None, False] * 3, [None, True]]).slice(1)
    assert column_values(flags, null=False).tolist() == [each is True for each in flags.to_pylist()]
    numbers_ = pa.chunked_array([[1.5, None], [None, float("nan"), 2.0]]).slice(1)
    assert np.array_equal(floats(numbers_), [np.nan, np.nan, np.nan, 2.0], equal_nan=True)
    assert floats(pa.chunked_array([[1, None]])).tolist()[0] == 1.0
    assert column_values(pa.chunked_array([], type=pa.bool_()), null=False).dtype == np.bool_
    assert column_values(pa.chunked_array([pa.array([], pa.int64())]), null=-1).tolist() == []
