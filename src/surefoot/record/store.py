"""The run folder as its one writer sees it: takes batches of messages in and appends them to the right files.

Used by the writer thread alone. Raises `OSError` where the disk fails; what had been written stays readable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.record.encode import Encoder
from surefoot.record.events import EventFile
from surefoot.record.segments import FOLDER, Segment, SegmentName
from surefoot.record.sessions import Session

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from surefoot.record.messages import Batch
    from surefoot.record.schema import TableName


class Store:
    """One session in one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.session = Session(folder)
        self._encoder = Encoder(self.session.number)
        self._events = EventFile(folder)
        self._open: dict[TableName, Segment] = {}
        self._next = 0

    def write(self, batch: Batch) -> None:
        """Append everything in a batch."""
        self._events.append(batch.events)
        messages: tuple[Any, ...] = (*batch.steps, *batch.layers, *batch.histograms)
        for message in messages:
            self.session.began(message.part, message.step)
        self._append("scalars", self._encoder.encode("scalars", batch.steps))
        self._append("layers", self._encoder.encode("layers", batch.layers))
        self._append("histograms", self._encoder.encode("histograms", batch.histograms))
        self._append("device", self._encoder.encode("device", batch.devices))

    def close(self) -> None:
        """Mark the ends of the files."""
        for segment in self._open.values():
            segment.close()
        self.session.close()

    def _append(self, table: TableName, rows: pa.RecordBatch | None) -> None:
        if rows is None:
            return
        segment = self._open.get(table)
        if segment is None or segment.schema != rows.schema:
            if segment is not None:
                segment.close()
            name = SegmentName(table, self.session.number, "0", self._next)
            self._next += 1
            segment = self._open[table] = Segment(self.folder / FOLDER / str(name), rows.schema)
        segment.append(rows)
