"""Columns of Arrow tables as numpy arrays."""

import numpy as np
import pyarrow as pa

from surefoot.record.columns import numbers, words


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
