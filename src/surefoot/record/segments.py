"""The files of a table: Arrow IPC streams that are appended to, and readable up to their last complete batch.

A batch is serialized first and written with one call, so that a process that dies leaves at most an incomplete last
batch, which the reader drops. A write that fails (a full disk) is undone by truncating the file to its last valid size.

The name describes a file completely: `scalars-000-0-00012.arrows` is table, session, level and number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.core.files import OwnedFile, append_all
from surefoot.record.schema import TABLES, TableName, fits

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

FOLDER = "telemetry"
EVENTS = "e"
"""The level of the rows near events."""
_NAME = re.compile(rf"({'|'.join(TABLES)})-(\d{{3,}})-(\d+|{EVENTS})-(\d{{5,}})\.arrows")


@dataclass(frozen=True)
class SegmentName:
    """The rows that a file contains."""

    table: TableName
    session: int
    """The session that wrote it."""
    level: str
    """The level: `0` has every row, `1` every eighth step, `2` every sixty-fourth …; `e` the rows near events."""
    number: int

    def __str__(self) -> str:
        return f"{self.table}-{self.session:03d}-{self.level}-{self.number:05d}.arrows"

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        """A parsed file name, or `None` if it is not a segment."""
        match = _NAME.fullmatch(name)
        return match and cls(match[1], int(match[2]), match[3], int(match[4]))  # type: ignore[arg-type]


def segments_in(folder: Path) -> Iterator[SegmentName]:
    """The segments of a run, oldest first in each level, the most thinned level first."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = [name for entry in os.listdir(folder / FOLDER) if (name := SegmentName.parse(entry))]
        yield from sorted(found, key=lambda name: (name.table, -level_rank(name.level), name.session, name.number))


def level_rank(level: str) -> int:
    """The distance of a level from the newest rows; those near events come after all others."""
    return 99 if level == EVENTS else int(level)


class Segment:
    """One file that batches are appended to. Raises `OSError` on failure, and leaves complete batches."""

    def __init__(self, path: Path, schema: pa.Schema, compress: bool = False) -> None:
        import pyarrow as pa

        self.path, self.schema = path, schema
        self.size = self.rows = 0
        self._pieces = _Pieces()
        codec = "zstd" if compress and pa.Codec.is_available("zstd") else None
        options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)  # the other cores are for training
        self._stream = pa.ipc.new_stream(pa.PythonFile(self._pieces, "w"), schema, options=options)
        self._file = OwnedFile(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        self._is_open = True

    def append(self, batch: pa.RecordBatch) -> None:
        """Write a batch completely or, with an `OSError`, not at all."""
        self._stream.write_batch(batch)
        self._write()
        self.rows += batch.num_rows

    def close(self) -> None:
        """Mark the end in the file and close it."""
        if not self._is_open:
            return
        try:
            self._stream.close()
            self._write()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leave the file unchanged; after a failure nothing may be appended to it."""
        self._is_open = False
        self._file.close()

    def _write(self) -> None:
        data = self._pieces.take()
        append_all(self._file.number, data)
        self.size += len(data)


class _Pieces:
    """Collects Arrow's output, so that it is written to the file in one call."""

    closed = False

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytearray:
        data, self._data = self._data, bytearray()
        return data

    def flush(self) -> None: ...

    def close(self) -> None: ...


def read_segment(path: Path, table: TableName, use_threads: bool = False) -> tuple[pa.Table | None, str]:
    """The complete batches of a file, and a description of the fault in the rest; empty if there is none."""
    import pyarrow as pa

    data = path.read_bytes()
    batches: list[pa.RecordBatch] = []
    schema, wrong = None, ""
    try:
        stream = pa.ipc.open_stream(pa.BufferReader(data), options=pa.ipc.IpcReadOptions(use_threads=use_threads))
        if not fits(table, stream.schema):
            return None, f"{path.name}: its columns are not those of `{table}`"
        schema = stream.schema
        for batch in stream:
            batch.validate(full=True)  # bytes may be damaged; using an invalid batch would end the process
            batches.append(batch)
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        if data:
            wrong = f"{path.name}: {str(error).splitlines()[0]}"
    return None if schema is None else pa.Table.from_batches(batches, schema), wrong
