"""Bounds the size of a table for any length of run: old rows are thinned, except for those near an event.

A table has levels. Rows arrive in level 0, in segments (files) that are closed when they are full, and then rewritten
as one compressed batch. When a level exceeds its share of the table's limit, its oldest segment is read, every eighth
step of it is appended to the next level, and the file is deleted; so level 1 has every 8th step of an older time, level
2 every 64th of a still older one. The last level is halved in place when it is full.

Rows that leave level 0 near an event (50 steps before or after) are also copied to level `e`, which is not thinned. By
then the rows on both sides of the event are known. When `e` is full, its first half is kept, and the oldest rows after
it are deleted. The first segment of the run is kept indefinitely, because the beginning of a run is needed most often.

::

    share = limit / 8        levels 0 to 5: a share each      e: a share      first segment: a quarter share
                             a segment: a quarter share       rest: what is being written at the moment

A file takes a few kilobytes before its first row, and more with many columns. If a share is small, segments are larger
than a quarter of it; if it could not hold three files without rows, the limit is raised, with a warning.

A process that dies in the middle leaves some rows in two levels, never in none; the reader returns a row once. Segments
of earlier sessions, whose processes have ended, are included, so that a run that is resumed five hundred times is as
small as one without interruption.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.record.arrays import from_numpy, numbers, to_numpy
from surefoot.record.segments import EVENTS, FOLDER, Segment, SegmentName, read_segment

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from surefoot.record.schema import TableName

log = logging.getLogger("surefoot")

FACTOR = 8
"""A level contains every nth step of the one below."""
LAST_LEVEL = 5
STEPS_AROUND = 50
"""The number of steps before and after an event that are near it."""
MOST_SPANS = 10_000
FIXED_TIMES = 3
"""The minimum size of a segment, as a multiple of an empty file, even if the limit of the table is small."""


class EventNeighbourhood:
    """The steps near events, as spans that do not overlap."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def add(self, step: int) -> None:
        """An event happened at this step."""
        spans = self._spans
        first, last = step - STEPS_AROUND, step + STEPS_AROUND
        start = end = bisect_right(spans, (first, first))
        if start and spans[start - 1][1] >= first:
            start -= 1
        while end < len(spans) and spans[end][0] <= last:
            end += 1
        if end > start:
            first, last = min(first, spans[start][0]), max(last, spans[end - 1][1])
        spans[start:end] = [(first, last)]
        del spans[:-MOST_SPANS]  # older rows have left level 0 long ago

    def near(self, steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which of these steps are near an event."""
        if not self._spans:
            return np.zeros(len(steps), dtype=bool)
        spans = np.array(self._spans, dtype=np.int64)
        index = np.searchsorted(spans[:, 0], steps, side="right") - 1
        return (index >= 0) & (steps <= spans[np.maximum(index, 0), 1])  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Closed:
    """A file that is no longer written."""

    name: SegmentName
    size: int


class TableFiles:
    """The files of one table on disk, by level: closed ones, and the one that is being written."""

    def __init__(self, folder: Path, table: TableName, session: int, share: int) -> None:
        self._folder = folder / FOLDER
        self._table, self._session, self.share = table, session, share
        self._closed: dict[str, list[_Closed]] = {}
        self._open: dict[str, Segment] = {}
        self._numbers: dict[str, int] = {}
        self._first: SegmentName | None = SegmentName(table, session, "0", 0)
        """The first segment of the run, which is never thinned."""

    def adopt(self, names: Iterable[SegmentName]) -> None:
        """Take over the segments of sessions whose processes have ended, oldest first."""
        for name in names:
            with suppress(FileNotFoundError):
                closed = _Closed(name, os.stat(self._folder / str(name)).st_size)
                self._closed.setdefault(name.level, []).append(closed)
        if fresh := self._closed.get("0"):
            self._first = fresh[0].name if fresh[0].name.number == 0 else None

    def close(self) -> None:
        """Mark the end of every open file."""
        for segment in self._open.values():
            segment.close()
        self._open.clear()

    def abandon(self) -> None:
        """Leave the open files unchanged."""
        for segment in self._open.values():
            segment.abandon()
        self._open.clear()

    def segment_bytes(self, level: str, rows: pa.RecordBatch) -> int:
        """The maximum size of a segment of a level with such rows: several times the size of an empty one.

        Otherwise a file would be full with its first rows and push a file into the next level, and so on for every few
        rows.
        """
        usual = self.share // 8 if level == EVENTS else self.share // 4
        return max(usual, min(FIXED_TIMES * fixed_bytes(rows), self.share // 2))

    def append(self, level: str, rows: pa.RecordBatch) -> None:
        """Append rows to the open segment of a level."""
        segment = self._segment(level, rows.schema)
        try:
            segment.append(rows)
        except OSError:
            del self._open[level]
            self._retire(level, segment)
            raise
        if segment.size >= self.segment_bytes(level, rows):
            self.close_level(level)

    def _segment(self, level: str, schema: pa.Schema) -> Segment:
        segment = self._open.get(level)
        if segment is not None and segment.schema != schema:  # a new signal needs a new column
            self.close_level(level)
            segment = None
        if segment is None:
            number = self._numbers.get(level, 0)
            name = SegmentName(self._table, self._session, level, number)
            self._numbers[level] = number + 1
            segment = self._open[level] = Segment(self._folder / str(name), schema, compress=level != "0")
        return segment

    def close_level(self, level: str) -> None:
        """Close the open file of a level, if there is one."""
        segment = self._open.pop(level, None)
        if segment is None:
            return
        try:
            segment.close()
            if level == "0":
                _compact(segment, self._table)
        finally:
            self._retire(level, segment)

    def _retire(self, level: str, segment: Segment) -> None:
        """Add a file to the closed ones, or delete it if it is empty."""
        segment.abandon()
        if segment.rows:
            name = SegmentName.parse(segment.path.name)
            assert name is not None
            self._closed.setdefault(level, []).append(_Closed(name, segment.size))
        else:
            with suppress(OSError):
                segment.path.unlink()

    def closed(self, level: str) -> list[_Closed]:
        """The closed files of a level, oldest first."""
        return list(self._closed.get(level, ()))

    def thinnable(self, level: str) -> list[_Closed]:
        """The closed files of a level except for the first of the run."""
        return [each for each in self._closed.get(level, ()) if each.name != self._first]

    def size(self, level: str) -> int:
        """The bytes of a level, without the first segment of the run."""
        return sum(each.size for each in self.thinnable(level)) + (self._open[level].size if level in self._open else 0)

    def read(self, closed: _Closed, level: str) -> pa.Table | None:
        """The rows of a segment. One that cannot be read, or was deleted, is neither thinned nor deleted."""
        try:
            rows, _ = read_segment(self._folder / str(closed.name), self._table)
        except FileNotFoundError:
            rows = None
        if rows is None:
            self._closed[level].remove(closed)
            return None
        return rows.unify_dictionaries().combine_chunks()

    def delete(self, closed: _Closed, level: str) -> None:
        """Delete a segment."""
        self._closed[level].remove(closed)  # first, so that a file that cannot be deleted is not copied repeatedly
        with suppress(OSError):
            os.unlink(self._folder / str(closed.name))


class TableThinning:
    """One table, thinned as it grows. Raises `OSError` if the disk fails, and is then unchanged."""

    def __init__(self, folder: Path, table: TableName, session: int, limit: int, events: EventNeighbourhood) -> None:
        self._table, self._limit = table, limit
        self._surroundings = events
        self.files = TableFiles(folder, table, session, limit // 8)

    def append(self, rows: pa.RecordBatch) -> None:
        """Write new rows, and thin old ones if necessary."""
        self._make_share_fit(rows)
        for piece in self._pieces("0", rows):
            self.files.append("0", piece)
            self._make_room("0")

    def _make_share_fit(self, rows: pa.RecordBatch) -> None:
        """Raise the limit if a level cannot hold a few files without rows: every row would go through all levels."""
        needed = 3 * fixed_bytes(rows)
        if self.files.share >= needed:
            return
        self.files.share = needed
        log.warning(
            "`%s_bytes=%s` is too small for a table with %d columns: a file without rows takes %s bytes. Up to %s "
            "bytes are used. Log fewer names, or allow that much in `LogLimits`.",
            self._table,
            f"{self._limit:,}",
            rows.num_columns,
            f"{fixed_bytes(rows):,}",
            f"{8 * needed:,}",
        )

    def _pieces(self, level: str, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Rows in pieces that are not larger than a segment, and that do not divide a step if possible."""
        most = max(1, self.files.segment_bytes(level, rows) * rows.num_rows // max(rows.nbytes, 1))
        ends = _step_ends(rows) if self._table in ("layers", "histograms") else None
        start = 0
        while start < rows.num_rows:
            end = start + most
            if ends is not None and end < rows.num_rows:
                whole = ends[np.searchsorted(ends, end, side="right") - 1]
                end = int(whole) if whole > start else end
            yield rows.slice(start, end - start)
            start = end

    def _make_room(self, level: str) -> None:
        while self.files.size(level) > self.files.share and (thinnable := self.files.thinnable(level)):
            if level == str(LAST_LEVEL):
                self._halve(level)
                return
            self._thin(thinnable[0], level)
            self._make_room(str(int(level) + 1))

    def _thin(self, closed: _Closed, level: str) -> None:
        """Move a segment to the next level: every eighth step of it."""
        rows = self.files.read(closed, level)
        if rows is None:
            return
        if level == "0":
            near = self._surroundings.near(numbers(rows, "step"))
            self._append_table(EVENTS, _taken(rows, near))
            self._trim_events()
        self._append_table(str(int(level) + 1), _taken(rows, every_nth_step(rows, FACTOR)))
        self.files.delete(closed, level)

    def _halve(self, level: str) -> None:
        """Thin out the last level in place: every second step of its closed segments, in one new segment."""
        self.files.close_level(level)
        for closed in self.files.closed(level):
            rows = self.files.read(closed, level)
            if rows is not None:
                self._append_table(level, _taken(rows, every_nth_step(rows, 2)))
                self.files.delete(closed, level)

    def _trim_events(self) -> None:
        """Keep the first half of the rows near events, and as many of the last ones as fit."""
        while self.files.size(EVENTS) > self.files.share:
            early = 0
            for closed in self.files.closed(EVENTS):
                early += closed.size
                if early > self.files.share // 2:
                    self.files.delete(closed, EVENTS)
                    break
            else:
                return

    def _append_table(self, level: str, rows: pa.Table) -> None:
        for batch in rows.combine_chunks().to_batches():
            for piece in self._pieces(level, batch):
                self.files.append(level, piece)


def fixed_bytes(rows: pa.RecordBatch) -> int:
    """The approximate size of a file with such rows before the first row: its columns, and a batch's description."""
    return 2 * int(rows.schema.serialize().size)


def _compact(segment: Segment, table: TableName) -> None:
    """Rewrite a closed file as one compressed batch, under the same name: a batch per second has much overhead."""
    rows, wrong = read_segment(segment.path, table)
    if rows is None or wrong:
        return
    scratch = segment.path.with_name(f".{segment.path.name}.part")
    with suppress(OSError):
        scratch.unlink()
    with suppress(OSError):  # on a full disk the old one is kept
        compact = Segment(scratch, rows.schema, compress=True)
        try:
            for batch in rows.unify_dictionaries().combine_chunks().to_batches():
                compact.append(batch)
            compact.close()
            os.replace(scratch, segment.path)
            segment.size = compact.size
        except OSError:
            compact.abandon()
            scratch.unlink()


def _step_ends(rows: pa.RecordBatch) -> np.ndarray[Any, Any]:
    """The positions where one step ends and another begins."""
    steps = to_numpy(rows.column("step"), null=-1)
    return np.concatenate([[0], np.flatnonzero(np.diff(steps)) + 1, [len(steps)]])


def every_nth_step(rows: pa.Table, n: int) -> np.ndarray[Any, Any]:
    """The rows to keep: those of every nth step of each part and session, or of every nth reading of each source."""
    if "source" in rows.schema.names:
        groups, units = numbers(rows, "source"), numbers(rows, "time")
    else:
        groups, units = numbers(rows, "part"), numbers(rows, "step")
    groups = groups.astype(np.int64) * (1 << 20) + numbers(rows, "session")
    keep = np.zeros(len(units), dtype=bool)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        _, rank = np.unique(units[members], return_inverse=True)
        keep[members] = rank % n == 0
    return keep


def _taken(rows: pa.Table, which: np.ndarray[Any, Any]) -> pa.Table:
    return rows.filter(from_numpy(which))
