"""TensorBoard: scalars, histograms and events as text, in one event file per process.

The records are TensorBoard's own messages, framed by its own `RecordWriter`; the file is opened here. `SummaryWriter`
and its thread are not used on purpose: a full disk then raises in this call and not in another thread, a fork in the
middle of a write cannot write a buffer twice, and TensorFlow is not imported if it is installed. A failed write is
truncated, so that earlier records stay readable and the file can be continued.

One record holds all numbers of a step. NaN and Inf are kept; TensorBoard keeps 32-bit floats.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.record.bins import EDGES
from surefoot.record.sinks.extras import load
from surefoot.record.sinks.named_values import BatchReader, PlacedItem, Point, full_name, sentence

if TYPE_CHECKING:
    from surefoot.record.messages import Batch, Event

_numbers = itertools.count()


class TensorBoardSink:
    """Writes the run log for `tensorboard --logdir FOLDER`. Needs `pip install -e ".[tensorboard]"`."""

    def __init__(self, folder: str | os.PathLike[str], *, every_steps: int = 1, layers_every_steps: int = 100) -> None:
        """`layers_every_steps=0` leaves the per-layer numbers out; skipped and non-finite steps are always sent."""
        self._proto = load("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = load("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._tensor = load("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        self._shape = load("tensorboard.compat.proto.tensor_shape_pb2", "tensorboard")
        self._records = load("tensorboard.summary.writer.record_writer", "tensorboard")
        self.folder = Path(folder)
        self._reader = BatchReader(every_steps, layers_every_steps)
        self._file: io.FileIO | None = None
        self._closed = False

    def write(self, batch: Batch) -> None:
        """Append one record per step, layer row, histogram and event."""
        if self._closed:
            return
        reading = self._reader.read(batch)
        events = [self._of_point(point) for point in reading.points if point.values]
        events += [event for placed in reading.histograms if (event := self._of_histogram(placed)) is not None]
        events += [self._of_event(placed) for placed in reading.events]
        if events:
            self._append(events, first=reading.points)

    def close(self) -> None:
        """Close the file. Each batch is already on disk when `write` returns."""
        self._closed = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, events: Sequence[Any], first: Sequence[Point]) -> None:
        if self._file is None:
            self._file = self._opened()
        if not os.fstat(self._file.fileno()).st_size:
            events = [*self._preamble(first), *events]
        framed = io.BytesIO()
        frames = self._records.RecordWriter(framed)
        for event in events:
            frames.write(event.SerializeToString())
        _append_whole(self._file, framed.getvalue())

    def _opened(self) -> io.FileIO:
        self.folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        process = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):06d}"
        return open(self.folder / f"events.out.tfevents.{process}", "ab", buffering=0)

    def _preamble(self, points: Sequence[Point]) -> Iterator[Any]:
        now = time.time()
        yield self._proto.Event(wall_time=now, file_version="brain.Event:2")
        if points and not any(point.part for point in points):
            # A resumed run: TensorBoard then drops what an earlier process wrote at this step and later. It does so for
            # every curve, so this is not used if parts count their own steps.
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            yield self._proto.Event(wall_time=now, step=points[0].step, session_log=start)

    def _of_point(self, point: Point) -> Any:
        values = [
            self._summary.Summary.Value(tag=full_name(point.part, name), simple_value=value)
            for name, value in point.values.items()
        ]
        return self._record(point, values)

    def _of_histogram(self, placed: PlacedItem) -> Any | None:
        histogram = placed.item
        message = self._histogram(histogram.counts)
        if message is None:
            return None
        tag = full_name(placed.part, f"histogram_{histogram.kind}/{histogram.layer}")
        return self._record(placed, [self._summary.Summary.Value(tag=tag, histo=message)])

    def _histogram(self, counts: Sequence[int]) -> Any | None:
        counts = [int(count) for count in counts]
        filled = [index for index, count in enumerate(counts) if count]
        if not filled:
            return None
        first, last = filled[0], filled[-1]
        middles = [(EDGES[i] + EDGES[i + 1]) / 2 for i in range(first, last + 1)]
        within = [float(count) for count in counts[first : last + 1]]
        return self._summary.HistogramProto(
            min=EDGES[first],
            max=EDGES[last + 1],
            num=sum(within),
            sum=sum(count * middle for count, middle in zip(within, middles, strict=True)),
            sum_squares=sum(count * middle**2 for count, middle in zip(within, middles, strict=True)),
            bucket_limit=EDGES[first + 1 : last + 2],
            bucket=within,
        )

    def _of_event(self, placed: PlacedItem) -> Any:
        event: Event = placed.item
        text = f"**{event.severity}** `{event.event}` {sentence(event)}"
        tensor = self._tensor.TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=self._shape.TensorShapeProto(dim=[self._shape.TensorShapeProto.Dim(size=1)]),
        )
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        value = self._summary.Summary.Value(
            tag=full_name(placed.part, "events/log"),
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=tensor,
        )
        return self._record(placed, [value])

    def _record(self, at: Point | PlacedItem, values: Sequence[Any]) -> Any:
        return self._proto.Event(wall_time=at.time, step=at.step, summary=self._summary.Summary(value=values))


def _append_whole(file: io.FileIO, content: bytes) -> None:
    """Append all or nothing: an incomplete record would end the file for its readers."""
    before = os.fstat(file.fileno()).st_size
    try:
        left = memoryview(content)
        while left:
            left = left[file.write(left) or 0 :]
    except BaseException:
        file.truncate(before)
        raise
