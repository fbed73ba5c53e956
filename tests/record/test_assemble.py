"""A table from its pieces: sorted, each row once, without what a later session has superseded."""

import pyarrow as pa

from surefoot.record.assemble import assemble, empty
from surefoot.record.encode import Encoder
from surefoot.record.messages import DeviceRow, StepRow
from surefoot.record.schema import TABLES, public_schema


def rows(session, steps, loss=0.0, part=""):
    messages = [StepRow(step, time=float(step), part=part, loss=loss) for step in steps]
    return pa.Table.from_batches([Encoder(session).encode("scalars", messages)])


def put_together(*pieces, first=None):
    tables = assemble({table: [] for table in TABLES} | {"scalars": list(pieces)}, first or {})
    return [(row["step"], row["part"], row["loss"]) for row in tables["scalars"].to_pylist()]


def test_rows_are_sorted_by_step_and_part():
    found = put_together(rows(0, [3, 1], part="b"), rows(0, [2, 1], part="a"))
    assert [(step, part) for step, part, _ in found] == [(1, "b"), (1, "a"), (2, "a"), (3, "b")]


def test_of_a_row_in_two_levels_the_one_that_was_written_last_is_kept():
    assert put_together(rows(0, [1, 2], loss=1.0), rows(0, [2], loss=5.0)) == [(1, "", 1.0), (2, "", 5.0)]


def test_a_resumed_session_replaces_the_rows_from_its_first_step_on():
    assert [step for step, _, _ in put_together(rows(0, range(6)), rows(1, [4]))] == [0, 1, 2, 3, 4]


def test_where_a_session_began_counts_even_if_its_first_rows_are_gone():
    found = put_together(rows(0, range(6)), rows(1, [5]), first={(1, ""): 3})
    assert [step for step, _, _ in found] == [0, 1, 2, 5]


def test_parts_are_superseded_each_by_itself():
    found = put_together(rows(0, [1, 2], part="a"), rows(0, [1, 2], part="b"), rows(1, [2], part="b"))
    assert sorted((step, part) for step, part, _ in found) == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_readings_of_devices_are_never_superseded():
    readings = [
        pa.Table.from_batches([Encoder(session).encode("device", [DeviceRow(float(session), "host", step=5)])])
        for session in (0, 1)
    ]
    tables = assemble({table: [] for table in TABLES} | {"device": readings}, {})
    assert tables["device"].num_rows == 2
    assert tables["device"].column_names == public_schema("device").names


def test_a_table_without_rows_has_its_columns():
    assert all(empty(table).schema == public_schema(table) for table in TABLES)
