"""Columns of a table as arrays."""

import importlib.util

import numpy as np
import pyarrow as pa

import forked
from surefoot.report.page.columns import by_part, coded, measured, whole_numbers
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
