"""The columns of the run log's tables, on disk and for readers."""

import pyarrow as pa
import pytest

from surefoot.record.schema import DEVICE_NUMBERS, TABLES, fits, public_schema, schema_of


@pytest.mark.parametrize("table", TABLES)
def test_readers_get_all_columns_but_the_session(table):
    stored, public = schema_of(table), public_schema(table)
    assert "session" in stored.names
    assert [name for name in stored.names if name != "session"] == public.names[: len(stored.names) - 1]


def test_readings_of_devices_have_a_column_each():
    assert set(DEVICE_NUMBERS) <= set(public_schema("device").names)


@pytest.mark.parametrize("table", TABLES)
def test_a_file_fits_with_further_numbers_and_not_with_other_types(table):
    assert fits(table, schema_of(table))
    assert fits(table, schema_of(table, ["signal.kl"]))
    assert not fits(table, schema_of(table).append(pa.field("more", pa.string())))
    assert not fits(table, schema_of(table).remove(0))
    assert not fits(table, schema_of(table).append(schema_of(table).field(0)))
