"""`events.jsonl`: the events of a run, one JSON object per line, written immediately.

A line is written in one call; a process that dies leaves at most an incomplete last line, which the reader skips and
the next session does not append to. Non-finite numbers are words (`"nan"`, `"inf"`), because JSON has no such numbers.

Very frequent events are thinned: of each kind (the event and its cause) the first thousand are written, then every
tenth up to ten thousand, every hundredth up to a hundred thousand, and so on: a million make 3,700 lines. Those lines
contain the number of occurrences so far (`count` in their evidence), and an event `drops` records the thinning.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from surefoot.core.files import NO_LINKS, append_all, read_file
from surefoot.record.messages import Event
from surefoot.record.run_folder import as_json

if TYPE_CHECKING:
    from pathlib import Path

NAME = "events.jsonl"
WRITTEN_IN_FULL = 1000
"""The number of events of each kind that are written before they are thinned."""
MOST_KINDS = 500
"""Further kinds are counted together: a cause per step would be a kind per step."""
LONGEST_LINE = 32768
"""A longer line is written without its evidence."""
MOST_UNSAVED = 1000
"""The number of events that wait while the disk fails; the oldest are lost first."""
_FIELDS = tuple(field.name for field in fields(Event))
_WORDS = tuple(name for name in _FIELDS if name not in ("step", "time", "evidence"))


class EventThinning:
    """Decides which events are written when there are very many."""

    def __init__(self, earlier: Iterable[Event] = ()) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._silent: Counter[tuple[str, str]] = Counter()  # since the last written one
        for event in earlier:
            kind = self._kind(event)
            self._counts[kind] = max(self._counts[kind] + 1, _count(event))

    def admit(self, event: Event) -> Iterator[Event]:
        """The lines to write for an event: itself, itself with a count, or nothing."""
        kind = self._kind(event)
        self._counts[kind] += 1
        count = self._counts[kind]
        if count <= WRITTEN_IN_FULL:
            yield event
            return
        if count == WRITTEN_IN_FULL + 1:
            yield _notice(
                event, f"more than {WRITTEN_IN_FULL:,} of {_kind_text(kind)}: only some of the further ones are written"
            )
        self._silent[kind] += 1
        if count % 10 ** (len(str(count - 1)) - 3) == 0:
            self._silent[kind] = 0
            yield replace(event, evidence={**_evidence(event), "count": count})

    def final_events(self) -> Iterator[Event]:
        """The total counts, for kinds whose last events were not written."""
        for kind, silent in self._silent.items():
            if silent:
                event = Event("drops", None, "", time.time(), cause=kind[1], evidence={"of": kind[0]})
                yield _notice(event, f"{self._counts[kind]:,} of {_kind_text(kind)} in all", count=self._counts[kind])
        self._silent.clear()

    def _kind(self, event: Event) -> tuple[str, str]:
        kind = (str(event.event), str(event.cause))
        return kind if kind in self._counts or len(self._counts) < MOST_KINDS else ("others", "")


def _kind_text(kind: tuple[str, str]) -> str:
    return f"`{kind[0]}`" + (f" ({kind[1]})" if kind[1] else "")


def _evidence(event: Event) -> dict[str, object]:
    return dict(event.evidence) if isinstance(event.evidence, dict) else {"evidence": event.evidence}


def _count(event: Event) -> int:
    count = event.evidence.get("count", 0)
    return count if isinstance(count, int) else 0


def _notice(event: Event, summary: str, **evidence: object) -> Event:
    of = _evidence(event).get("of", event.event)
    return Event("drops", event.step, summary, event.time, cause=event.cause, evidence={"of": of, **evidence})


class EventFile:
    """Appends events to the file of a run. Raises `OSError` on failure, and keeps them for the next attempt."""

    def __init__(self, folder: Path, session: int = 0) -> None:
        self.path, self._session = folder / NAME, session
        self.earlier = self._read()
        """The events that earlier sessions wrote."""
        self._thinning = EventThinning(self.earlier)
        self._unsaved: list[Event] = []
        self._end_is_known = False

    def keep(self, events: Iterable[Event]) -> int:
        """Keep these until the next `append`; returns how many of the oldest had to be dropped."""
        self._unsaved += [each for event in events for each in _admitted(self._thinning, event)]
        too_many = max(0, len(self._unsaved) - MOST_UNSAVED)
        del self._unsaved[:too_many]
        return too_many

    def append(self, events: Iterable[Event]) -> None:
        """Write these, in order, after those that could not be written before."""
        admitted = [each for event in events for each in _admitted(self._thinning, event)]
        waiting = [*self._unsaved, *admitted]
        if waiting:
            try:
                lines = "".join(_line(event, self._session) for event in waiting)
                self._write(lines.encode("utf-8", "replace"))
            except OSError:
                self._unsaved = waiting
                raise
        self._unsaved = []

    def final_events(self) -> Iterator[Event]:
        """The events at the end of the run."""
        return self._thinning.final_events()

    def _read(self) -> list[Event]:
        try:
            return parse_events(read_file(self.path))[0]
        except FileNotFoundError:
            return []

    def _write(self, data: bytes) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | NO_LINKS, 0o666)
        try:
            _check_plain(file)
            if not self._end_is_known and _is_torn(file):
                data = b"\n" + data
            self._end_is_known = False
            append_all(file, data)
            self._end_is_known = True
        finally:
            os.close(file)


def _check_plain(file: int) -> None:
    """Refuse a pipe or a device in place of the file, which could block."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, f"{NAME} is not a plain file")


def _admitted(flood: EventThinning, event: Event) -> Iterable[Event]:
    return (event,) if event.event == "drops" else flood.admit(event)


def _is_torn(file: int) -> bool:
    """Whether the last line of a file is incomplete."""
    if os.fstat(file).st_size == 0:
        return False
    os.lseek(file, -1, os.SEEK_END)
    return os.read(file, 1) != b"\n"


def _line(event: Event, session: int) -> str:
    fields = {name: getattr(event, name) for name in _FIELDS} | ({"session": session} if session else {})
    try:
        fields["step"] = None if event.step is None else int(event.step)
        line = as_json(fields)
        if len(line) <= LONGEST_LINE:
            return line + "\n"
        why = f"it would have made a line of {len(line):,} characters"
    except Exception as error:  # evidence that contains itself, an object that cannot be shown
        why = f"it cannot be written as JSON: {type(error).__name__}"
    summary = str(event.summary)[: LONGEST_LINE // 4]
    known = {"event": str(event.event), "summary": summary, "time": event.time, "severity": str(event.severity)}
    known |= {"session": session} if session else {}
    step = int(event.step) if isinstance(event.step, Integral) else None
    return as_json({**known, "step": step, "cause": str(event.cause)[:200], "evidence": {"left_out": why}}) + "\n"


def parse_events(data: bytes) -> tuple[list[Event], int]:
    """The events of these lines, and the number of invalid lines."""
    parsed, bad = parse_sessions(data)
    return [event for event, _ in parsed], bad


def parse_sessions(data: bytes) -> tuple[list[tuple[Event, int]], int]:
    """The events of these lines, each with the session that wrote it, and the number of invalid lines."""
    lines = [_event(line) for line in data.split(b"\n") if line.strip()]
    events = [line for line in lines if line is not None]
    return events, len(lines) - len(events)


def _event(line: bytes) -> tuple[Event, int] | None:
    try:
        entry = json.loads(line)
        step, evidence = entry.get("step"), entry.get("evidence")
        words: Any = {name: _word(entry[name]) for name in _WORDS if name in entry}
        event = Event(
            **words,
            step=None if step is None else int(step),
            evidence=evidence if isinstance(evidence, dict) else {},
            time=float(entry["time"]),
        )
        return event, int(entry.get("session", 0))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _word(value: Any) -> str:
    """Convert to text: readers use it as a key and truncate it, and the file is untrusted."""
    return value if isinstance(value, str) else "" if value is None else str(value)
