"""Assembles a table from the pieces in its segments: sorted, without duplicates, and without superseded rows.

A row may occur twice, in two levels, if it is near an event or if a process died while thinning; of several with the
same keys, the last written one is kept. Rows of an earlier session at or after the first step of a later one are left
out, for each part separately: the run was resumed from an earlier step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from surefoot.record.arrays import Array, from_numpy, numbers, words
from surefoot.record.schema import TABLES, TableName, public_schema

if TYPE_CHECKING:
    import pyarrow as pa

    from surefoot.record.sessions import FirstSteps

_KEYS: dict[TableName, tuple[str, ...]] = {
    "scalars": ("step", "part"),
    "layers": ("step", "part", "layer"),
    "histograms": ("step", "part", "kind", "layer"),
    "device": ("time", "source"),
}
"""The columns that identify a row of a table; it is sorted by the first."""


def assemble(pieces: Mapping[TableName, Sequence[pa.Table]], first: FirstSteps) -> dict[TableName, pa.Table]:
    """The tables, from their pieces in the order in which they were written, and the first step of each session."""
    joined = {table: _joined(pieces[table]) for table in TABLES}
    began = dict(first)
    for table in ("scalars", "layers", "histograms"):
        _note_first_steps(joined[table], began)
    return {table: _tidy(table, rows, began) for table, rows in joined.items()}


def empty(table: TableName) -> pa.Table:
    """A table without rows, with its columns."""
    return public_schema(table).empty_table()


def _joined(pieces: Sequence[pa.Table]) -> pa.Table | None:
    import pyarrow as pa

    if not pieces:
        return None
    return pa.concat_tables(pieces, promote_options="default").unify_dictionaries().combine_chunks()


def _note_first_steps(rows: pa.Table | None, began: FirstSteps) -> None:
    """Sessions record their first step; if that was lost, it is taken from their rows."""
    if rows is None:
        return
    steps, sessions, parts = (numbers(rows, name) for name in ("step", "session", "part"))
    for session in _distinct(sessions):
        for code, part in enumerate(words(rows, "part")):
            mine = steps[(sessions == session) & (parts == code)]
            if len(mine):
                lowest = int(mine.min())
                began[session, part] = min(lowest, began.get((session, part), lowest))


def _distinct(sessions: Array) -> list[int]:
    distinct: list[int] = np.unique(sessions).tolist()
    return distinct


def _tidy(table: TableName, rows: pa.Table | None, began: FirstSteps) -> pa.Table:
    import pyarrow as pa

    if rows is None:
        return empty(table)
    keep = np.arange(rows.num_rows) if table == "device" else np.flatnonzero(~_superseded(rows, began))
    order = _in_order(rows, _KEYS[table], keep)
    if len(order) != rows.num_rows or not np.array_equal(order, np.arange(len(order))):
        rows = rows.take(from_numpy(order))
    known = public_schema(table)
    columns = {f.name: rows[f.name] if f.name in rows.column_names else pa.nulls(len(rows), f.type) for f in known}
    extra = {name: rows[name] for name in rows.column_names if name not in columns and name != "session"}
    return pa.table({**columns, **extra})


def _superseded(rows: pa.Table, began: FirstSteps) -> Array:
    """The rows that a later session has written again, or would have."""
    steps, sessions, parts = (numbers(rows, name) for name in ("step", "session", "part"))
    gone = np.zeros(len(steps), dtype=bool)
    for session in _distinct(sessions):
        for code, part in enumerate(words(rows, "part")):
            later = [step for (number, name), step in began.items() if number > session and name == part]
            if later:
                gone |= (parts == code) & (sessions == session) & (steps >= min(later))
    return gone


def _in_order(rows: pa.Table, keys: tuple[str, ...], keep: Array) -> Array:
    """The rows to keep, sorted; of several with the same keys, the last."""
    columns = [numbers(rows, name)[keep] for name in keys]
    combined = _combined(columns)
    order = np.lexsort(columns[::-1]) if combined is None else np.argsort(combined, kind="stable")
    if combined is not None:
        columns = [combined]
    differs = np.ones(len(order), dtype=bool)
    if len(order):
        ordered = [column[order] for column in columns]
        differs[:-1] = np.any([column[1:] != column[:-1] for column in ordered], axis=0)
    chosen: Array = keep[order[differs]]
    return chosen


def _combined(columns: list[Array]) -> Array | None:
    """Several integers combined into one with the same order, if they fit: much faster to sort."""
    if any(column.dtype.kind != "i" for column in columns) or not len(columns[0]):
        return None
    combined, room = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        low, high = int(column.min()), int(column.max())
        room *= high - low + 1
        if room >= 1 << 62:
            return None
        combined = combined * (high - low + 1) + (column - low)
    return combined
