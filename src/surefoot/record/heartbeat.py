"""`alive.json`: the progress of one rank and whether it moves, for the other ranks to read.

The file is written again every few seconds, in place and with a fixed length, so that a reader sees the newest content
on a network file system too, where a renamed file may stay hidden for a minute. A reader that reads during a write
finds invalid JSON, and reads again later.

Each write has a number. Readers check by their own clock whether it grows: no clocks are compared.

The rank that ends first writes `ended.json`, next to the folders of the ranks.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from surefoot.core.activity import began_at, machine, started_at
from surefoot.core.files import NO_LINKS, new_file, read_file, write_file
from surefoot.core.formats import HEARTBEAT
from surefoot.core.redaction import Redactor
from surefoot.record.run_folder import as_json

if TYPE_CHECKING:
    from pathlib import Path

NAME = "alive.json"
FIRST_ENDED = "ended.json"
_LENGTH = 2048
_LONGEST_WORD = 300

Movement = Literal["moves", "waits", "stands", "busy", "debugged", "unwatched", "ended"]
"""The state of a rank: `waits` in a call that waits for other ranks, `stands` in any other line without doing any work,
works (`busy`) in one line, is held by a debugger, continues without being observed, or has ended."""


@dataclass(frozen=True)
class Beat:
    """The state of one rank, as it reports it."""

    rank: int
    world_size: int
    launch: str = ""
    """Equal for all ranks that were started together."""
    host: str = ""
    machine: str = ""
    """The kernel and the namespace of process ids; a process is visible if these are equal."""
    process: int = 0
    started: int | None = None
    """The start time of the process, in ticks of its machine."""
    began: float = 0.0
    """The start time of the process, in seconds since the epoch."""
    count: int = 0
    """The number of this write."""
    movement: Movement = "moves"
    seconds: float = 0.0
    """The time in seconds since it last moved."""
    step: int = 0
    """The number of steps it has taken."""
    where: str = ""
    """The current line of the script."""
    function: str = ""
    waits_in: str = ""
    """The call in which it waits for other ranks."""
    on_device: bool = False
    """Whether it uses a GPU, for whose queue it may wait with a busy CPU."""
    collective: str = ""
    """The last collective in torch's flight recorder, with its number."""
    own_ms: float | None = None
    """The median time of a step before its backward, in which no rank waits for another."""
    step_ms: float | None = None
    """The median time of a step."""
    measured_steps: int = 0
    """The number of steps for these two medians."""
    ending: str = ""
    """A description of its end."""
    code: int | None = None
    """Its exit code."""
    time: float = 0.0

    @property
    def place(self) -> str:
        """A description of its position."""
        inside = f" in {self.function}" if self.function and self.function != "<module>" else ""
        line = f"{self.where}{inside}" if self.where else "a line that is not the script's"
        return f"{self.waits_in} at {line}" if self.waits_in else line


_TYPES = {field.name: field.type for field in fields(Beat)}


def first_beat(rank: int, world_size: int) -> Beat:
    """The state of this process when its observation begins."""
    process = os.getpid()
    return Beat(
        rank,
        world_size,
        launch=launch_name(),
        host=socket.gethostname(),
        machine=machine(),
        process=process,
        started=started_at(process),
        began=began_at(),
    )


def launch_name() -> str:
    """An identifier that all ranks of one start share, and other starts do not, as far as can be determined."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT")
    return "/".join(os.environ.get(name, "") for name in names)


class BeatFile:
    """The file of this rank."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._redact = Redactor(identity=False)
        self._is_ours = False

    def write(self, beat: Beat) -> None:
        """Write the state. Raises `OSError`."""
        known = {name: value for name, value in asdict(beat).items() if value not in ("", None)}
        short = {name: value[:_LONGEST_WORD] if isinstance(value, str) else value for name, value in known.items()}
        text = as_json(self._redact.inside({HEARTBEAT.key: HEARTBEAT.version, **short})).encode("utf-8", "replace")
        descriptor = self._open()
        try:
            os.write(descriptor, text.ljust(_LENGTH - 1) + b"\n")
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        """The file, created by the first write: an existing one may be a link to another file."""
        if self._is_ours:
            with suppress(FileNotFoundError):  # it was already deleted
                return os.open(self._path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0) | NO_LINKS)
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._is_ours = True
        return new_file(self._path)


def read_beat(folder: Path, strict: bool = False) -> Beat | None:
    """The state in this folder; `None` if there is nothing that can be read now.

    With `strict`, another version raises `UsageError`; the ranks themselves read as much as they can.
    """
    return _beat(folder / NAME, strict)


def _beat(path: Path, strict: bool = False) -> Beat | None:
    try:
        held = json.loads(read_file(path))
        version = held.pop(HEARTBEAT.key)
        if strict:
            HEARTBEAT.check(version, str(path))
        if HEARTBEAT.problem(version):
            return None
        known: dict[str, Any] = {name: value for name, value in held.items() if name in _TYPES}
        beat = Beat(**known)
        return beat if all(_fits(getattr(beat, name), default) for name, default in _DEFAULTS.items()) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


_DEFAULTS: dict[str, Any] = asdict(Beat(0, 1))


def _fits(value: Any, default: Any) -> bool:
    """Whether a value has the expected type: the file is untrusted."""
    if default is None:
        return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(default)


def mark_end(top: Path, beat: Beat) -> None:
    """Record that this rank was the first of this start to end. Raises `OSError`."""
    path = top / FIRST_ENDED
    text = as_json(Redactor(identity=False).inside({HEARTBEAT.key: HEARTBEAT.version, **asdict(beat)}))
    try:
        descriptor = new_file(path)
    except FileExistsError:
        if first_ended(top, beat) is None:  # the file is of an earlier run in the same folder
            write_file(path, text)
        return
    try:
        os.write(descriptor, text.encode("utf-8", "replace"))
    finally:
        os.close(descriptor)


def read_first_ended(top: Path, strict: bool = False) -> Beat | None:
    """The last state of the rank that ended first; `None` if there is none. See `read_beat` for `strict`."""
    return _beat(top / FIRST_ENDED, strict)


def first_ended(top: Path, mine: Beat) -> Beat | None:
    """The rank that ended first, if one has ended since this rank began."""
    found = read_first_ended(top)
    if found is None or found.launch != mine.launch or found.time < mine.began:
        return None
    return found


def forget_ends(top: Path, mine: Beat) -> None:
    """Remove the file of an earlier run in the same folder."""
    if first_ended(top, mine) is None:
        with suppress(OSError):
            os.unlink(top / FIRST_ENDED)


def ended(beat: Beat, code: int, text: str) -> Beat:
    """The last state of a rank."""
    last = {"ending": text[:_LONGEST_WORD], "function": "", "waits_in": "", "collective": ""}
    return replace(beat, movement="ended", count=beat.count + 1, seconds=0.0, code=code, time=time.time(), **last)  # type: ignore[arg-type]
