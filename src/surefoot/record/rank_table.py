"""Compares the ranks of a run: step time, gradient norm and memory of each, in a few hundred stretches of steps.

The ranks are read one after the other, and only one row per number is kept of each. So the memory grows with the number
of ranks times the number of columns, not with the steps. The columns are those of the first rank, and end with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from surefoot.record.arrays import column_values, floats
from surefoot.record.assemble import assemble
from surefoot.record.schema import TABLES
from surefoot.record.segments import FOLDER, read_segment, segments_in
from surefoot.record.sessions import first_steps

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    import pyarrow as pa

    from surefoot.record.schema import TableName

    Numbers: TypeAlias = "npt.NDArray[np.float64]"

MOST_COLUMNS = 200
_MEMORY = ("allocated", "process_memory")
"""Columns of the device table, of which the first with numbers is used: of the accelerator, or else of the process."""


@dataclass
class RankTable:
    """One row per rank and one column per stretch of steps; NaN where nothing was measured."""

    starts: list[int] = field(default_factory=list)
    """The first step of each column."""
    ranks: list[int] = field(default_factory=list)
    step_seconds: list[Numbers] = field(default_factory=list)
    """The longest mean time of a step within each column."""
    grad_norm: list[Numbers] = field(default_factory=list)
    """The largest gradient norm; Inf where one is not finite."""
    memory: list[Numbers] = field(default_factory=list)
    """The most bytes; between two readings, those of the earlier one."""
    last_steps: list[int] = field(default_factory=list)
    """The last step of each rank."""


def read_rank_table(folders: Iterable[Path], most_columns: int = MOST_COLUMNS) -> RankTable:
    """Read the logs of the ranks, whose folders end in their numbers. Ranks without a log are left out."""
    table = RankTable()
    edges: npt.NDArray[np.int64] | None = None
    for folder in folders:
        scalars = _rows(folder, "scalars")
        if scalars is None or not scalars.num_rows:
            continue
        steps = _column(scalars, "step").astype(np.int64)
        if edges is None:
            edges = _edges(steps, most_columns)
            table.starts = edges[:-1].tolist()
        table.ranks.append(int(folder.name.removeprefix("rank")))
        table.last_steps.append(int(steps[-1]))
        table.step_seconds.append(_largest(steps[1:], _seconds(steps, _column(scalars, "time")), edges))
        norms, missing = _column(scalars, "grad_norm"), column_values(scalars.column("grad_norm").is_null(), null=True)
        table.grad_norm.append(_largest(steps, np.where(missing | np.isfinite(norms), norms, np.inf), edges))
        table.memory.append(_memory(folder, edges))
    return table


def _rows(folder: Path, table: TableName) -> pa.Table | None:
    """The rows of one table of a run; files that cannot be read are left out."""
    pieces = []
    for name in segments_in(folder):
        if name.table == table:
            try:
                rows, _ = read_segment(folder / FOLDER / str(name), table)
            except OSError:
                continue
            if rows is not None and rows.num_rows:
                pieces.append(rows)
    if not pieces:
        return None
    held: dict[TableName, list[pa.Table]] = {each: [] for each in TABLES}
    return assemble(held | {table: pieces}, first_steps(folder))[table]


def _column(table: pa.Table, name: str) -> Numbers:
    return floats(table.column(name))


def _edges(steps: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """The first step of each column, and the end of the last one."""
    low, high = int(steps.min()), int(steps.max()) + 1
    count = min(most, high - low)
    return np.unique(np.linspace(low, high, count + 1).astype(np.int64))


def _seconds(steps: npt.NDArray[np.int64], times: Numbers) -> Numbers:
    """The time per step between two rows, which may be several steps apart."""
    ahead = np.diff(steps)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.diff(times) / ahead
    return np.where((ahead > 0) & (found >= 0), found, np.nan)


def _largest(steps: npt.NDArray[np.int64], values: Numbers, edges: npt.NDArray[np.int64]) -> Numbers:
    """The largest value of each column."""
    columns = np.searchsorted(edges, steps, side="right") - 1
    here = (columns >= 0) & (columns < len(edges) - 1) & ~np.isnan(values)
    found = np.full(len(edges) - 1, -np.inf)
    np.maximum.at(found, columns[here], values[here])
    return np.where(np.isneginf(found), np.nan, found)


def _memory(folder: Path, edges: npt.NDArray[np.int64]) -> Numbers:
    nothing = np.full(len(edges) - 1, np.nan)
    device = _rows(folder, "device")
    if device is None:
        return nothing
    steps = _column(device, "step")
    for name in _MEMORY:
        if name in device.column_names and device.column(name).null_count < device.num_rows:
            known = ~np.isnan(steps)
            return _held(_largest(steps[known].astype(np.int64), _column(device, name)[known], edges))
    return nothing


def _held(values: Numbers) -> Numbers:
    """The values, in which a gap between two readings has the earlier one: the device is read every few seconds."""
    read = np.flatnonzero(~np.isnan(values))
    if len(read):
        values[read[0] : read[-1]] = np.repeat(values[read[:-1]], np.diff(read))
    return values
