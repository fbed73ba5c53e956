"""`load_run`: a run folder as tables, whatever state its writer left it in.

Each table is put together from its segments: sorted by step, without duplicates, without the rows of an earlier session
that a later one has superseded (it was resumed from before them). A torn last batch or line is dropped, and whatever
else cannot be read is told in `problems`; nothing of that raises. Works while the run is being written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.errors import UsageError
from surefoot.record import events as event_file
from surefoot.record.schema import TABLES, TableName, public_schema
from surefoot.record.segments import FOLDER, read_segment, segments_in
from surefoot.record.sessions import first_steps

if TYPE_CHECKING:
    import os

    import pyarrow as pa

    from surefoot.record.messages import Event
    from surefoot.record.sessions import FirstSteps

_MARKS = ("run.json", event_file.NAME, FOLDER)
_KEYS: dict[TableName, tuple[str, ...]] = {
    "scalars": ("step", "part"),
    "layers": ("step", "part", "layer"),
    "histograms": ("step", "part", "kind", "layer"),
    "device": ("time", "source"),
}
"""What tells one row of a table from another; the first is what it is sorted by."""


@dataclass(frozen=True)
class RunTables:
    """What a run folder holds. Tables without rows have their columns all the same."""

    folder: Path
    run: dict[str, Any]
    """`run.json`: what was run, where, with which versions, how it ended."""
    events: list[Event]
    findings: dict[str, Any] | None
    """`findings.json`, where there has been a diagnosis."""
    scalars: pa.Table
    layers: pa.Table
    histograms: pa.Table
    device: pa.Table
    dropped: int = 0
    """How many messages never reached the log, because training was faster than the disk."""
    problems: list[str] = field(default_factory=list)
    """What could not be read."""


def load_run(folder: str | os.PathLike[str]) -> RunTables:
    """Everything a run folder holds, as pyarrow tables."""
    path = Path(folder)
    _require_run_folder(path)
    problems: list[str] = []
    events = _events(path, problems)
    return RunTables(
        folder=path,
        run=_json(path / "run.json", problems) or {},
        events=events,
        findings=_json(path / "findings.json", problems),
        dropped=sum(int(event.evidence.get("dropped", 0)) for event in events if event.event == "drops"),
        problems=problems,
        **_tables(path, problems),
    )


def is_run_folder(path: Path) -> bool:
    """Whether a run was ever logged here."""
    return any((path / mark).exists() for mark in _MARKS)


def _require_run_folder(path: Path) -> None:
    if is_run_folder(path):
        return
    way_out = "Give the folder that `surefoot run --out` or `RunLog` was given."
    if not path.is_dir():
        raise UsageError(f"{path} is no folder. {way_out}")
    ranks = sorted(child.name for child in path.glob("rank*") if is_run_folder(child))
    if ranks:
        way_out = f"It holds one run per rank: load {path / ranks[0]}" + (" or another." if ranks[1:] else ".")
    raise UsageError(f"{path} is no run folder: it has none of {', '.join(_MARKS)}. {way_out}")


def _json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name}: {error}")
        return None
    return value if isinstance(value, dict) else None


def _events(path: Path, problems: list[str]) -> list[Event]:
    try:
        events, bad = event_file.parse_events((path / event_file.NAME).read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{event_file.NAME}: {error}")
        return []
    if bad:
        problems.append(f"{event_file.NAME}: {bad} {'line' if bad == 1 else 'lines'} cut short")
    return events


def _tables(path: Path, problems: list[str]) -> dict[str, pa.Table]:
    pieces: dict[TableName, list[pa.Table]] = {table: [] for table in TABLES}
    for name in segments_in(path):
        rows, wrong = read_segment(path / FOLDER / str(name))
        if wrong:
            problems.append(wrong)
        if rows is not None and rows.num_rows:
            pieces[name.table].append(rows)
    joined = {table: _joined(pieces[table]) for table in TABLES}
    first = first_steps(path)
    return {table: _tidy(table, joined[table], first) for table in TABLES}


def _joined(pieces: list[pa.Table]) -> pa.Table | None:
    import pyarrow as pa

    if not pieces:
        return None
    whole = pa.concat_tables(pieces, promote_options="default")
    return whole.unify_dictionaries().combine_chunks()


def _tidy(table: TableName, rows: pa.Table | None, first: FirstSteps) -> pa.Table:
    import pyarrow as pa

    schema = public_schema(table)
    if rows is None:
        return schema.empty_table()
    keep = np.ones(rows.num_rows, dtype=bool)
    if table != "device":
        keep = ~_superseded(rows, first)
    order = _order(rows, _KEYS[table], keep)
    rows = rows.take(pa.array(order))
    columns = {f.name: rows[f.name] if f.name in rows.column_names else pa.nulls(len(rows), f.type) for f in schema}
    extra = {name: rows[name] for name in rows.column_names if name not in columns and name != "session"}
    return pa.table({**columns, **extra})


def _codes(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """A column as numbers that are equal where its values are."""
    import pyarrow as pa

    array = column.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.indices
    if array.null_count:
        array = array.fill_null(-1)
    return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _words(column: pa.ChunkedArray) -> list[str]:
    return column.combine_chunks().dictionary.to_pylist()  # type: ignore[no-any-return]


def _superseded(rows: pa.Table, first: FirstSteps) -> np.ndarray[Any, Any]:
    """Which rows a later session has written again, or would have."""
    steps, sessions, parts = (_codes(rows[name]) for name in ("step", "session", "part"))
    gone = np.zeros(len(steps), dtype=bool)
    for code, part in enumerate(_words(rows["part"])):
        for session in np.unique(sessions[parts == code]).tolist():
            later = [step for (number, name), step in first.items() if number > session and name == part]
            if later:
                gone |= (parts == code) & (sessions == session) & (steps >= min(later))
    return gone


def _order(rows: pa.Table, keys: tuple[str, ...], keep: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The rows to keep, sorted by the first key; of several with the same keys, the one written last."""
    columns = [_codes(rows[name]) for name in keys]
    index = np.flatnonzero(keep)
    order = index[np.lexsort([column[index] for column in reversed(columns)])]
    if len(order) == 0:
        return order
    differs = np.zeros(len(order), dtype=bool)
    differs[-1] = True
    for column in columns:
        in_order = column[order]
        differs[:-1] |= in_order[1:] != in_order[:-1]
    return order[differs]
