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


def test_a_log_without_a_newer_number_fits_and_one_without_its_steps_does_not():
    older = schema_of("layers")
    for name in ("activation_mean", "activation_std", "activation_largest", "saturated_share"):
        older = older.remove(older.get_field_index(name))
    assert fits("layers", older)
    assert not fits("layers", older.remove(older.get_field_index("layer")))
    wrong = older.set(older.get_field_index("grad_norm"), pa.field("grad_norm", pa.string()))
    assert not fits("layers", wrong)
