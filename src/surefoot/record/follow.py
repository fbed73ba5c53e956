"""Follows a run while it is being written: returns what is new since the last poll.

`surefoot watch` and `surefoot serve` call `poll` at intervals:

    follower = RunFollower("runs/exp1")
    while True:
        news = follower.poll()       # News(scalars, layers, histograms, device, events, restarted)
        if news.restarted: forget everything shown so far
        show(news)

The first poll returns everything (like `load_run`), later ones only what is new. `restarted` is true on the first poll
that finds a run, and whenever earlier results are no longer valid: a resumed session has superseded some of them, the
folder was emptied and filled again, or rows were thinned before they were read; then everything is returned again. A
folder that does not exist yet has no news.

New rows arrive in level 0 only, at the end of the newest file, so it is enough to read the files whose size has changed
and to leave out the rows that were already read. When a full file is rewritten as one batch, its name and its rows stay
the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.record import events as event_file
from surefoot.record.assemble import assemble, empty
from surefoot.record.reading import by_table, is_run_folder, is_undone, read_pieces
from surefoot.record.schema import TABLES
from surefoot.record.segments import FOLDER, SegmentName, read_segment, segments_in
from surefoot.record.sessions import check_versions, first_steps

if TYPE_CHECKING:
    import pyarrow as pa

    from surefoot.record.messages import Event


@dataclass(frozen=True)
class News:
    """Rows and events since the last poll, in the columns of `RunTables`. False if there is nothing new."""

    scalars: pa.Table
    layers: pa.Table
    histograms: pa.Table
    device: pa.Table
    events: list[Event] = field(default_factory=list)
    restarted: bool = False
    """Whether to discard earlier results: this is everything."""

    def __bool__(self) -> bool:
        tables = (self.scalars, self.layers, self.histograms, self.device)
        return self.restarted or bool(self.events) or any(table.num_rows for table in tables)


@dataclass(frozen=True)
class _Seen:
    size: int
    rows: int


class RunFollower:
    """Polls one run folder. Not thread-safe."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._forget()

    def poll(self) -> News:
        """The news since the last poll. Only files of a newer version raise an error, a `UsageError`."""
        if not is_run_folder(self.folder):
            return self._reset_missing()
        sizes = self._sizes()
        if not self._began or self._is_discontinued(sizes):
            return self._everything()
        try:
            pieces = self._new_rows(sizes)
        except FileNotFoundError:  # deleted by thinning in the meantime
            return self._everything()
        tables = assemble(by_table(pieces), {})
        return News(**tables, events=self._new_events())

    def _forget(self) -> None:
        self._began = False
        self._seen: dict[SegmentName, _Seen] = {}
        self._events_at, self._events_file = 0, 0

    def _reset_missing(self) -> News:
        """There is no run here, or it was deleted."""
        was_there = self._began
        self._forget()
        return News(**{table: empty(table) for table in TABLES}, restarted=was_there)

    def _everything(self) -> News:
        self._forget()
        check_versions(self.folder)
        self._began = True
        sizes = self._sizes()  # before reading: later rows are read again next time, and left out
        pieces = read_pieces(self.folder, [])
        self._seen = {name: _Seen(sizes.get(name, 0), rows.num_rows) for name, rows in pieces.items()}
        tables = assemble(by_table(pieces), first_steps(self.folder))
        return News(**tables, events=self._new_events(), restarted=True)

    def _sizes(self) -> dict[SegmentName, int]:
        """The files of level 0 and their sizes."""
        sizes = {}
        for name in segments_in(self.folder):
            if name.level == "0":
                try:
                    sizes[name] = os.stat(self.folder / FOLDER / str(name)).st_size
                except FileNotFoundError:
                    continue
        return sizes

    def _is_discontinued(self, sizes: dict[SegmentName, int]) -> bool:
        """Whether the current files do not continue the earlier ones."""
        if self._events_restarted():
            return True
        known = {name.session for name in self._seen}
        if known and any(name.session not in known for name in sizes):
            return True
        newest: dict[tuple[str, int], SegmentName] = {}
        for name in sorted((name for name in self._seen if name.level == "0"), key=lambda name: name.number):
            newest[name.table, name.session] = name
        if any(name not in sizes for name in newest.values()):
            return True
        after = {key: name.number + 1 for key, name in newest.items()}
        unseen = [name for name in sizes if name not in self._seen]
        return any(min_number(unseen, key) > after.get(key, 0) for key in {(n.table, n.session) for n in unseen})

    def _new_rows(self, sizes: dict[SegmentName, int]) -> dict[SegmentName, pa.Table]:
        pieces = {}
        for name, size in sizes.items():
            seen = self._seen.get(name, _Seen(-1, 0))
            if size != seen.size:
                rows, _ = read_segment(self.folder / FOLDER / str(name), name.table)
                if rows is not None:
                    pieces[name] = rows.slice(seen.rows)
                    self._seen[name] = _Seen(size, max(rows.num_rows, seen.rows))
        return pieces

    def _events_restarted(self) -> bool:
        try:
            status = os.stat(self.folder / event_file.NAME)
        except OSError:
            return self._events_at > 0
        return status.st_size < self._events_at or (self._events_file not in (0, status.st_ino))

    def _new_events(self) -> list[Event]:
        try:
            with (self.folder / event_file.NAME).open("rb") as file:
                self._events_file = os.fstat(file.fileno()).st_ino
                file.seek(self._events_at)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
        self._events_at += len(whole)
        firsts = first_steps(self.folder) if whole else {}
        events, _ = event_file.parse_sessions(whole)
        return [event for event, session in events if not is_undone(event, session, firsts)]


def min_number(names: list[SegmentName], key: tuple[str, int]) -> int:
    """The lowest number among the segments of a table and session."""
    return min(name.number for name in names if (name.table, name.session) == key)
