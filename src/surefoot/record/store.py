"""The run folder as its one writer sees it: takes batches of messages in and appends them to the right files.

Used by the writer thread alone, which imports this module (and pyarrow with it) when it starts. Each table and the
events fail by themselves: what cannot be written is counted, the rest is written all the same.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from surefoot.record.columns import numbers, words
from surefoot.record.encode import MOST_EXTRA_COLUMNS, Encoder
from surefoot.record.events import EventFile
from surefoot.record.schema import TABLES
from surefoot.record.segments import FOLDER, segments_in
from surefoot.record.sessions import Session, adopt
from surefoot.record.thinning import Surroundings, TableThinning

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from surefoot.record.limits import LogLimits
    from surefoot.record.messages import Batch, Event
    from surefoot.record.schema import TableName

log = logging.getLogger("surefoot")

_SHAKING = {"skip", "spike", "rollback", "lr-change", "resume"}
"""Events whose surroundings are kept even if they are mere information."""


class Loss(NamedTuple):
    """What a write could not do."""

    messages: int = 0
    error: Exception | None = None


class Store:
    """One session in one run folder. The constructor raises `OSError` where the folder cannot be used."""

    def __init__(self, folder: Path, limits: LogLimits) -> None:
        self._session = Session(folder)
        try:
            self._open(folder, limits)
        except BaseException:
            self._session.withdraw()
            raise

    def _open(self, folder: Path, limits: LogLimits) -> None:
        self._encoder = Encoder(self._session.number)
        self._surroundings = Surroundings()
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
        """Whether the folder was deleted, or another was put in its place."""
        return self._session.vanished()

    def write(self, batch: Batch) -> Loss:
        """Append everything in a batch; what could not be written, and why."""
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
        """Do without the disk for now: only the events of a batch are kept; how many messages that loses."""
        for event in batch.events:
            self._note(event)
        rows = sum(map(len, (batch.steps, batch.layers, batch.histograms, batch.devices)))
        return rows + self._events.keep(batch.events)

    def close(self) -> Loss:
        """Mark the ends of the files and release the session."""
        loss = self._write_events(list(self._events.final_events()))  # and those that could not be written before
        for thinned in self._tables.values():
            with suppress(OSError):
                thinned.files.close()
        self.release()
        return loss

    def release(self) -> None:
        """Leave the files as they are, for whoever comes next."""
        for thinned in self._tables.values():
            thinned.files.abandon()
        self._session.close()
        for session in self._adopted.values():
            session.close()

    def _note(self, event: Event) -> None:
        """Remember where something happened: the rows around it are kept."""
        if isinstance(event.step, Integral) and (event.severity != "info" or event.event in _SHAKING):
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
        except Exception as error:  # a full disk, most often; whatever it is must not end the writer
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
