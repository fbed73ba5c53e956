"""The processes that wrote into a run folder, one after another, and the first step of each.

A run that is resumed continues in the same folder as another session. Creating `telemetry/session-001.jsonl`, which
only one process can do, claims a number. The file is locked while its process lives, so that a later one knows whose
files it may thin. Its lines contain the first step of the session: `{"part": "", "first": 1200}`. The reader drops the
rows of earlier sessions from there on, even if the first rows of the later one have been thinned since.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from surefoot.core.files import OwnedFile, make_subfolder
from surefoot.core.formats import RUN_LOG
from surefoot.record.segments import FOLDER, segments_in

if TYPE_CHECKING:
    from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: sessions are not locked, and no process thins another's files
    fcntl = None  # type: ignore[assignment]

ADOPTING = "adopting.lock"
"""Locked by the process that thins the files of earlier sessions."""
FirstSteps = dict[tuple[int, str], int]
"""The first step of each (session, part)."""


class Session:
    """The claim of one process on a number."""

    def __init__(self, folder: Path) -> None:
        self.number, self._file = _claim(folder)
        self._path = _path(folder, self.number)
        self._first: dict[str, int] = {}
        _lock(self._file.number)
        try:
            self._append({"schema": RUN_LOG.version, "pid": os.getpid(), "time": time.time()})
        except OSError:
            self.withdraw()
            raise

    def began(self, part: str, step: int) -> None:
        """Record the first step of a part; later calls have an effect only for an earlier step."""
        if step < self._first.get(part, step + 1):
            self._append({"part": part, "first": step})
            self._first[part] = step

    def vanished(self) -> bool:
        """Whether the folder was deleted or replaced, or its files were closed by other code."""
        return not self._file.is_at(self._path)

    def withdraw(self) -> None:
        """Release the number: nothing was written under it."""
        with suppress(OSError):
            self._path.unlink()
        self.close()

    def close(self) -> None:
        """Release the lock."""
        self._file.close()

    def _append(self, line: dict[str, object]) -> None:
        os.write(self._file.number, (json.dumps(line) + "\n").encode())


def _claim(folder: Path) -> tuple[int, OwnedFile]:
    make_subfolder(folder / FOLDER)
    taken = [*_numbers(folder), *(name.session for name in segments_in(folder))]
    number = max(taken, default=-1) + 1
    while True:
        with suppress(FileExistsError):  # another process was faster
            return number, OwnedFile(_path(folder, number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        number += 1


def _path(folder: Path, number: int) -> Path:
    return folder / FOLDER / f"session-{number:03d}.jsonl"


def _numbers(folder: Path) -> list[int]:
    found = []
    for path in (folder / FOLDER).glob("session-*.jsonl"):
        with suppress(ValueError):
            found.append(int(path.stem.split("-")[1]))
    return sorted(found)


def _lock(file: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def adopt(folder: Path, before: int) -> dict[int, OwnedFile]:
    """The earlier sessions whose processes have ended: only this process may change their files.

    One process at a time may adopt, until it closes the file, which is one and the same for all sessions.
    """
    earlier = [number for number in _numbers(folder) if number < before]
    if not earlier:
        return {}
    with suppress(OSError):
        file = OwnedFile(folder / FOLDER / ADOPTING, os.O_RDWR | os.O_CREAT)
        gone = [number for number in earlier if _is_over(folder, number)] if _lock(file.number) else []
        if gone:
            return dict.fromkeys(gone, file)
        file.close()
    return {}


def _is_over(folder: Path, number: int) -> bool:
    """Whether the process of a session has ended. Its number is never used again."""
    with suppress(OSError):
        file = OwnedFile(_path(folder, number), os.O_RDWR)
        over = _lock(file.number)
        file.close()
        return over
    return False


def check_versions(folder: Path) -> None:
    """Raise `UsageError` if a session was written in a version that cannot be read. Damaged files are skipped."""
    for number in _numbers(folder):
        path = _path(folder, number)
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                entry = json.loads(file.readline())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            RUN_LOG.check(entry.get(RUN_LOG.key, 1), str(path))  # the first sessions recorded no version


def first_steps(folder: Path) -> FirstSteps:
    """The first step of each session, for each part that it wrote."""
    found: FirstSteps = {}
    for number in _numbers(folder):
        with suppress(OSError):
            for line in _path(folder, number).read_text("utf-8", "replace").splitlines():
                with suppress(
                    ValueError, TypeError, KeyError, OverflowError, RecursionError
                ):  # an incomplete line, or the one that names the process
                    entry = json.loads(line)
                    key = (number, str(entry["part"]))
                    found[key] = min(int(entry["first"]), found.get(key, int(entry["first"])))
    return found
