"""`rank.jsonl`: what one of several ranks records for a comparison with the others, one JSON object per line.

The first line is the rank's setup. A line for each optimizer and each of its records follows, as they are made. A line
is written in one call, so a process that dies leaves at most an incomplete last line, which the reader leaves out. A
file is read line by line: a merge of many ranks never holds more than one line of each.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from surefoot.core.files import NO_LINKS, OwnedFile, new_file
from surefoot.core.formats import RANK
from surefoot.record.facts import FactsError, RankOptimizer, RankSetup, ReplicaLook
from surefoot.record.run_folder import as_json

NAME = "rank.jsonl"
RankEntry: TypeAlias = "RankSetup | RankOptimizer | ReplicaLook"
_KINDS: dict[str, type[RankSetup] | type[RankOptimizer] | type[ReplicaLook]] = {
    "setup": RankSetup,
    "optimizer": RankOptimizer,
    "look": ReplicaLook,
}
_WORDS = {kind: word for word, kind in _KINDS.items()}


class RankFile:
    """The file of this rank, created when the first line is written. Raises `OSError` on failure."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file: OwnedFile | None = None

    def append(self, entry: RankEntry) -> None:
        """Write one line."""
        if self._file is None:
            with suppress(FileNotFoundError):
                os.unlink(self._path)  # a file of an earlier run in the same folder
            os.close(new_file(self._path))
            self._file = OwnedFile(self._path, os.O_WRONLY | os.O_APPEND)
        marked = {"schema": RANK.version} if isinstance(entry, RankSetup) else {}
        line = as_json({**marked, "kind": _WORDS[type(entry)], **entry.to_json()})
        os.write(self._file.number, f"{line}\n".encode("utf-8", "replace"))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_rank(folder: Path) -> Iterator[RankEntry]:
    """The lines of a rank's file, up to the first damaged one; empty if there is no file.

    Raises `UsageError` for a version that cannot be read.
    """
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | NO_LINKS)
    except OSError:
        return
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return
        for line in file:
            entry = _entry(line, str(folder / NAME))
            if entry is None:
                return
            yield entry


def _entry(line: bytes, source: str) -> RankEntry | None:
    try:
        value = json.loads(line)
        kind = _KINDS[value.pop("kind")]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    if kind is RankSetup:
        value = RANK.read(value, source, unmarked=1)
    try:
        return kind.from_json(value, source)
    except FactsError:
        return None


def rank_folders(folder: Path) -> list[Path]:
    """The folders of a run's ranks, in the order of their numbers; empty for a run of one process."""
    if (folder / "run.json").is_file() or (folder / "telemetry").is_dir():
        return []
    found = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            number = entry.name.removeprefix("rank")
            if entry.name.startswith("rank") and number.isdecimal() and entry.is_dir(follow_symlinks=False):
                found[int(number)] = Path(entry.path)
    return [found[number] for number in sorted(found)]
