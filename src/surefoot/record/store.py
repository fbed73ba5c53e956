"""Appends batches of messages to the files of a run folder.

Used only by the writer thread, which imports this module (and pyarrow with it) when it starts. Each table and the
events fail independently: what cannot be written is counted, and the rest is still written.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from surefoot.record.arrays import numbers, words
from surefoot.record.encode import MOST_EXTRA_COLUMNS, Encoder
from surefoot.record.events import EventFile
from surefoot.record.schema import TABLES, TableName
from surefoot.record.segments import FOLDER, segments_in
from surefoot.record.sessions import Session, adopt
from surefoot.record.thinning import EventNeighbourhood, TableThinning

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.record.limits import LogLimits
    from surefoot.record.messages import Batch, Event

log = logging.getLogger("surefoot")

_NOTABLE_EVENTS = {"skip", "spike", "rollback", "lr-change", "resume"}
"""Events whose neighbouring rows are kept even if their severity is `info`."""


class Loss(NamedTuple):
    """The part of a write that failed."""

    messages: int = 0
    error: Exception | None = None


class Store:
    """One session in one run folder. The constructor raises `OSError` if the folder cannot be used."""

    def __init__(self, folder: Path, limits: LogLimits) -> None:
        self._session = Session(folder)
        try:
            self._open(folder, limits)
        except BaseException:
            self._session.withdraw()
            raise

    def _open(self, folder: Path, limits: LogLimits) -> None:
        self._encoder = Encoder(self._session.number)
        self._surroundings = EventNeighbourhood()
        self._events = EventFile(folder, self._session.number)
        for event in self._events.earlier:
            self._note(event)
        number, around = self._session.number, self._surroundings
        self._tables = {table: TableThinning(folder, table, number, limits.of(table), around) for table in TABLES}
        self._adopted = adopt(folder, before=number)
        names = [name for name in segments_in(folder) if name.session in self._adopted]
        for table, thinned in self._tables.items():
            thinned.files.adopt(name for name in names if name.table == table)
        for leftover in (folder / FOLDER).glob(".*.part"):
            if any(f"-{number:03d}-" in leftover.name for number in self._adopted):
                leftover.unlink(missing_ok=True)
        self._refused_before, self._warned_columns = 0, False

    def vanished(self) -> bool:
        """Whether the folder was deleted or replaced."""
        return self._session.vanished()

    def write(self, batch: Batch) -> Loss:
        """Append everything in a batch; returns what could not be written, and why."""
        for event in batch.events:
            self._note(event)
        losses = [self._write_events(batch.events)]
        rows: dict[TableName, Sequence[Any]] = {
            "scalars": batch.steps,
            "layers": batch.layers,
            "histograms": batch.histograms,
            "device": batch.devices,
        }
        losses += [self._write_rows(table, messages) for table, messages in rows.items() if messages]
        refused, self._refused_before = self._encoder.refused - self._refused_before, self._encoder.refused
        self._warn_of_columns()
        error = next((loss.error for loss in losses if loss.error is not None), None)
        return Loss(sum(loss.messages for loss in losses) + refused, error)

    def keep_events(self, batch: Batch) -> int:
        """Skip the disk for now: only the events of a batch are kept; returns the number of lost messages."""
        for event in batch.events:
            self._note(event)
        rows = sum(map(len, (batch.steps, batch.layers, batch.histograms, batch.devices)))
        return rows + self._events.keep(batch.events)

    def close(self) -> Loss:
        """Mark the ends of the files and release the session."""
        loss = self._write_events(list(self._events.final_events()))  # including those that could not be written before
        for thinned in self._tables.values():
            with suppress(OSError):
                thinned.files.close()
        self.release()
        return loss

    def release(self) -> None:
        """Leave the files unchanged, for a later process."""
        for thinned in self._tables.values():
            thinned.files.abandon()
        self._session.close()
        for session in self._adopted.values():
            session.close()

    def _note(self, event: Event) -> None:
        """Remember the steps of events: the rows around them are kept."""
        if isinstance(event.step, Integral) and (event.severity != "info" or event.event in _NOTABLE_EVENTS):
            self._surroundings.add(int(event.step))

    def _write_events(self, events: Sequence[Event]) -> Loss:
        try:
            self._events.append(events)
        except OSError as error:  # they are kept, and written when that is possible again
            return Loss(self._events.keep(()), error)
        except Exception as error:
            return Loss(len(events), error)
        return Loss()

    def _write_rows(self, table: TableName, messages: Sequence[Any]) -> Loss:
        try:
            rows = self._encoder.encode(table, messages)
            if rows is not None:
                self._note_beginning(rows)
                self._tables[table].append(rows)
        except Exception as error:  # usually a full disk; no error may end the writer
            return Loss(len(messages), error)
        return Loss()

    def _note_beginning(self, rows: pa.RecordBatch) -> None:
        if "part" not in rows.schema.names:
            return
        table = pa.Table.from_batches([rows])
        steps, parts = numbers(table, "step"), numbers(table, "part")
        for code, part in enumerate(words(table, "part")):
            if len(mine := steps[parts == code]):
                self._session.began(part, int(mine.min()))

    def _warn_of_columns(self) -> None:
        if self._encoder.columns_left_out and not self._warned_columns:
            self._warned_columns = True
            log.warning(
                "More than %d different names of signals were logged: further names are ignored. Use fewer names; do "
                "not put the step into a name.",
                MOST_EXTRA_COLUMNS,
            )
