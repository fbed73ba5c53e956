"""The report of `init_for` as data and as a table."""

import pytest

from surefoot.build.init.report import InitReport, InitRow, text_table

REPORT = InitReport(
    (
        InitRow("0.weight", (4, 8), "he", 0.5, "relu follows"),
        InitRow("0.bias", (4,), "left", None, "frozen"),
    )
)


def test_written_and_left_parameters_are_separate():
    assert [row.name for row in REPORT.written] == ["0.weight"]
    assert [row.name for row in REPORT.left] == ["0.bias"]


def test_a_row_is_found_by_name_and_a_wrong_name_shows_the_names_there_are():
    assert REPORT["0.bias"].why == "frozen"
    with pytest.raises(KeyError, match=r"0\.weight"):
        REPORT["1.weight"]


def test_the_table_has_a_row_per_parameter_and_a_summary():
    lines = str(REPORT).splitlines()
    assert lines[2].split()[:4] == ["0.weight", "4×8", "he", "0.5"]
    assert lines[-1] == "1 parameters initialised, 1 left as they were"


def test_columns_are_as_wide_as_their_widest_cell_and_lines_have_no_trailing_blanks():
    table = text_table(("name", "why"), [("a.weight", "x"), ("b", "because")])
    assert table.splitlines() == [
        "name      why",
        "--------  -------",
        "a.weight  x",
        "b         because",
    ]


def test_a_table_without_rows_is_its_header():
    assert text_table(("name",), []) == "name\n----"
