"""`events.jsonl`: what happened, one JSON object per line, written as it happens.

A line reaches the file in one call; a process that dies leaves at most a torn last line, which the reader skips and the
next session does not append to. What is not finite is a word (`"nan"`, `"inf"`), since JSON has no such numbers.

Floods are thinned: of each kind (the event and its cause) the first thousand are written, then every tenth up to ten
thousand, every hundredth up to a hundred thousand, and so on. What is written then carries in its evidence how many
there have been (`count`).
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from surefoot.launch.folder import as_json
from surefoot.record.messages import Event

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NAME = "events.jsonl"
WRITTEN_IN_FULL = 1000
"""How many of each kind are written before they are thinned."""
LONGEST_LINE = 65536
"""A line longer than this, in bytes, is written without its evidence."""
_FIELDS = tuple(field.name for field in fields(Event))


class EventFile:
    """Appends events to the file of a run. Raises `OSError` where that fails."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._torn: bool | None = None  # whether the last line has no end; unknown until the file is looked at

    def append(self, events: Iterable[Event]) -> None:
        """Write these, in order."""
        data = "".join(_line(event) for event in events).encode("utf-8", "replace")
        if not data:
            return
        if self._torn is None:
            self._torn = _has_torn_end(self.path)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._write(file, (b"\n" if self._torn else b"") + data)
        finally:
            os.close(file)

    def _write(self, file: int, data: bytes) -> None:
        size, rest = os.fstat(file).st_size, memoryview(data)
        self._torn = None
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            if os.fstat(file).st_size == size + len(data) - len(rest):  # nobody else has written meanwhile
                with suppress(OSError):
                    os.ftruncate(file, size)
            raise
        self._torn = False


def _line(event: Event) -> str:
    said = asdict(event)
    line = as_json(said)
    if len(line) > LONGEST_LINE:
        said["evidence"] = {"left_out": f"{len(line):,} characters of evidence"}
        said["summary"] = str(said["summary"])[: LONGEST_LINE // 2]
        line = as_json(said)
    return line + "\n"


def _has_torn_end(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False


def parse_events(data: bytes) -> tuple[list[Event], int]:
    """The events of these lines, and how many lines are none."""
    events, bad = [], 0
    for line in data.splitlines():
        if line.strip():
            event = _event(line)
            if event is None:
                bad += 1
            else:
                events.append(event)
    return events, bad


def _event(line: bytes) -> Event | None:
    try:
        said = json.loads(line)
        event = Event(**{name: said[name] for name in _FIELDS if name in said})
    except (ValueError, TypeError, RecursionError):
        return None
    evidence: Any = event.evidence if isinstance(event.evidence, dict) else {}
    return replace(event, evidence=evidence)
