from surefoot.build.tables import text_table


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
