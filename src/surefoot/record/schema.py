"""The columns of the run log's tables, in one place for its writer and its readers.

Four tables: `scalars` (one row per optimizer step), `layers` (one row per layer and step), `histograms` and `device`.
On disk each row also has the number of the session that wrote it: a resumed run continues in the same folder, and the
reader needs to know which rows the later session has superseded. `load_run` removes that column.

A number that was not measured is null; NaN and Inf are values, and are preserved. A row of `layers` that has a
`param_norm` and no `grad_norm` belongs to a parameter without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, TypeAlias

from surefoot.record import bins

if TYPE_CHECKING:
    import pyarrow as pa

TableName: TypeAlias = Literal["scalars", "layers", "histograms", "device"]
TABLES: tuple[TableName, ...] = ("scalars", "layers", "histograms", "device")

SIGNAL = "signal."
"""The prefix of the user's own signals, as columns of `scalars`."""
STEP_NUMBERS = ("loss", "grad_norm", "clip_factor", "lr", "loss_scale", "nonfinite")
LAYER_NUMBERS = (
    *("grad_norm", "grad_largest", "nonfinite", "param_norm", "update_ratio", "dead_share"),
    *("activation_mean", "activation_std", "activation_largest", "saturated_share"),
)
DEVICE_NUMBERS = (
    *("memory_used", "memory_total", "allocated", "reserved", "peak"),
    *("temperature", "power", "power_limit", "sm_clock", "memory_clock", "utilization"),
    *("ecc_corrected", "ecc_uncorrected", "throttle", "process_memory", "host_used", "host_total"),
)


def schema_of(table: TableName, extra: Iterable[str] = ()) -> pa.Schema:
    """The columns of a table on disk; `extra` are further numbers, each with its own column."""
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    session = ("session", pa.int32())
    columns = {
        "scalars": [
            ("step", pa.int64()),
            ("time", pa.float64()),
            ("part", word),
            *((name, pa.float64()) for name in STEP_NUMBERS),
            ("skipped", pa.bool_()),
            session,
        ],
        "layers": [
            ("step", pa.int64()),
            ("part", word),
            ("layer", word),
            *((name, pa.float32()) for name in LAYER_NUMBERS),
            session,
        ],
        "histograms": [
            ("step", pa.int64()),
            ("part", word),
            ("kind", word),
            ("layer", word),
            ("counts", pa.list_(pa.int32(), bins.COUNT)),
            *((name, pa.int64()) for name in ("nan", "positive_inf", "negative_inf")),
            session,
        ],
        "device": [("time", pa.float64()), ("step", pa.int64()), ("source", word), session],
    }[table]
    return pa.schema([*columns, *((name, pa.float64()) for name in extra)])


def fits(table: TableName, schema: pa.Schema) -> bool:
    """Whether a file with this schema can be a piece of the table.

    It must have the columns that identify a row; its other known columns must have their types, and all further ones
    must be numbers. A log that was written before a number was added has no column for it: readers get nulls.
    """
    import pyarrow as pa

    expected = schema_of(table)
    try:
        found = {field.name: field.type for field in schema}
    except UnicodeDecodeError:  # a damaged name
        return False
    further = [found[name] for name in found if name not in expected.names]
    may_lack = {"scalars": STEP_NUMBERS, "layers": LAYER_NUMBERS}.get(table, ())
    same = all(found.get(each.name, each.type if each.name in may_lack else None) == each.type for each in expected)
    return same and len(found) == len(schema) and all(each == pa.float64() for each in further)


def public_schema(table: TableName) -> pa.Schema:
    """The columns that a reader always gets, in order, even if nothing was logged."""
    extra = DEVICE_NUMBERS if table == "device" else ()
    schema = schema_of(table, extra)
    return schema.remove(schema.get_field_index("session"))
