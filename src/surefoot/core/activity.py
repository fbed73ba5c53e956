"""Measures the work of a process: CPU time and bytes read and written, including its child processes.

A rank that does not move and does no work has stopped. One that stays in the same line and uses the CPU or the disk is
evaluating, compiling, saving or loading. On Linux all of it is read from `/proc`, including the time that a process
waited for a busy CPU, and pages that had to be read back from disk. On other systems only the CPU time of this process
is known.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Literal

ProcessState = Literal["runs", "stopped", "traced", "gone"]
_PROC = "/proc"
_MOST_PROCESSES = 256
_PAGE_BYTES = 4096
try:
    _TICKS = os.sysconf("SC_CLK_TCK")
except (AttributeError, OSError, ValueError):
    _TICKS = 100


@dataclass(frozen=True)
class Work:
    """The work of a process and its children so far."""

    cpu_seconds: float
    bytes_moved: int
    """Read, written, or brought back into memory."""
    queued_seconds: float = 0.0
    """The time in which it was ready to run while others had the CPU."""


def own_work() -> Work:
    """The work of this process and its children, except for the calling thread."""
    process = os.getpid()
    try:
        every = _work_of(process)
    except (OSError, ValueError, IndexError):
        return Work(time.process_time() - time.thread_time(), 0)
    mine = _bytes_of(f"{_PROC}/{process}/task/{threading.get_native_id()}")
    return Work(every.cpu_seconds - time.thread_time(), every.bytes_moved - mine, every.queued_seconds)


def work_of(process: int) -> Work | None:
    """The work of another process of this machine and its children; `None` if it is not known."""
    try:
        return _work_of(process)
    except (OSError, ValueError, IndexError):
        return None


def started_at(process: int) -> int | None:
    """The start time of a process of this machine, in ticks, which distinguishes processes with the same id."""
    try:
        return int(_fields(f"{_PROC}/{process}")[19])
    except (OSError, ValueError, IndexError):
        return None


def began_at() -> float:
    """The start time of this process, in seconds since the epoch; the present time if it is not known."""
    try:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(_fields(f"{_PROC}/self")[19]) / _TICKS
    except (OSError, ValueError, IndexError, AttributeError):
        age = 0.0
    return time.time() - age


def machine() -> str:
    """An identifier that processes share if they can see each other: one kernel, and one namespace of process ids.

    Containers may share the name of their host without seeing each other. Empty if it is not known.
    """
    try:
        with open(f"{_PROC}/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink(f'{_PROC}/self/ns/pid')}"
    except OSError:
        return ""


def state_of(process: int, started: int | None) -> ProcessState | None:
    """The state of a process of this machine; `None` if it is not known."""
    if started is None or not os.path.isdir(f"{_PROC}/self"):
        return None
    try:
        fields = _fields(f"{_PROC}/{process}")
        if int(fields[19]) != started or fields[0] in ("Z", "X"):
            return "gone"
        return {"T": "stopped", "t": "traced"}.get(fields[0], "runs")  # type: ignore[return-value]
    except FileNotFoundError:
        return "gone"
    except (OSError, ValueError, IndexError):
        return None


def _fields(folder: str) -> list[str]:
    """The fields of `stat` from the state on: the name before may contain anything."""
    with open(f"{folder}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _work_of(process: int) -> Work:
    seconds, moved, queued = 0.0, 0, 0.0
    waiting, seen = [process], 0
    while waiting and seen < _MOST_PROCESSES:
        each = waiting.pop()
        folder = f"{_PROC}/{each}"
        try:
            fields = _fields(folder)
        except OSError:
            if not seen:
                raise
            continue  # a child that has ended in the meantime
        seen += 1
        seconds += (int(fields[11]) + int(fields[12])) / _TICKS
        queued += _queued_seconds(folder)
        moved += int(fields[9]) * _PAGE_BYTES + _bytes_of(folder)
        waiting += _children_of(folder)
    return Work(seconds, moved, queued)


def _queued_seconds(folder: str) -> float:
    """The time in which the first thread was ready to run and had no CPU."""
    try:
        with open(f"{folder}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _bytes_of(folder: str) -> int:
    try:
        with open(f"{folder}/io") as file:
            held = dict(line.split(": ", 1) for line in file)
        return int(held["rchar"]) + int(held["wchar"])
    except (OSError, ValueError, KeyError):
        return 0


def _children_of(folder: str) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"{folder}/task"):
            with open(f"{folder}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except (OSError, ValueError):
        return found
    return found
