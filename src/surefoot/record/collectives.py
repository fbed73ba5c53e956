"""Collectives of several ranks (NCCL, gloo): the event of one that failed, and the last ones that were started.

torch's flight recorder keeps a ring of the collectives that were started, for NCCL and, in newer versions, for gloo. It
is read from another thread and needs neither the device nor the other ranks. If torch has no recorder, or it is
disabled (`TORCH_FR_BUFFER_SIZE=0`, `TORCH_NCCL_TRACE_BUFFER_SIZE=0`), the result is empty.

Not covered: a process that NCCL's watchdog aborts, in which no Python code runs any more.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from surefoot.errors import with_causes
from surefoot.record.messages import Event

COLLECTIVE_FAILED = "dist.collective-failed"
"""The cause of the event."""
_KINDS = frozenset({"DistBackendError", "DistNetworkError"})
COLLECTIVE_WORDS = (
    "NCCL error",
    "NCCL timeout",
    "NCCL communicator was aborted",
    "/gloo/",
    "collective operation timeout",
)
"""Parts of the messages of errors of collectives."""
_LONGEST = 400


def failed_collective(error: BaseException | None) -> BaseException | None:
    """The error of a collective among an error and its causes; `None` if there is none.

    >>> failed_collective(RuntimeError("NCCL error in: ProcessGroupNCCL.cpp")) is not None
    True
    """
    for each in with_causes(error):
        kinds = {kind.__name__ for kind in type(each).__mro__}
        text = str(each) if isinstance(each, RuntimeError) else ""
        if kinds & _KINDS or any(part in text for part in COLLECTIVE_WORDS):
            return each
    return None


def collective_event(error: BaseException, step: int | None) -> Event:
    """The event for a collective that raised an error."""
    kind, words = type(error).__name__, " ".join(str(error).split())[:_LONGEST]
    evidence = {"error": kind}
    return Event(
        "alarm",
        step,
        f"a collective failed: {kind}: {words}",
        time.time(),
        "error",
        COLLECTIVE_FAILED,
        evidence=evidence,
    )


_READERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""The functions for NCCL, and for the other backends."""
MOST_ENTRIES = 64


@dataclass(frozen=True)
class Collective:
    """A collective that this rank has started."""

    name: str
    """With its backend, such as `nccl:all_reduce`."""
    number: int
    """The number of the collective in its process group."""
    group: str
    sizes: str
    is_complete: bool
    """Whether the recorder has recorded its end."""

    def __str__(self) -> str:
        state = "" if self.is_complete else ", not complete"
        return f"{self.name} number {self.number} of group {self.group}, sizes {self.sizes}{state}"


def recorded_collectives() -> list[Collective]:
    """The last collectives of this process, oldest first; empty if they are not recorded."""
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    found: list[Collective] = []
    for reader in (getattr(module, name, None) for name in _READERS):
        if reader is not None:
            try:
                found += collectives_of(json.loads(reader(includeCollectives=True, onlyActive=False)))
            except (RuntimeError, TypeError, ValueError):  # this version takes other arguments, or has no recorder
                continue
    return found


def collectives_of(trace: Any) -> list[Collective]:
    """The collectives of one trace, as torch writes it."""
    if not isinstance(trace, dict):
        return []
    status = trace.get("pg_status") or {}
    found = []
    for entry in (trace.get("entries") or [])[-MOST_ENTRIES:]:
        group, number = str(entry.get("pg_id", "")), int(entry.get("collective_seq_id", 0))
        known = status.get(group) or status.get(str((entry.get("process_group") or [""])[0])) or {}
        is_complete = entry.get("state") == "completed" or number <= int(known.get("last_completed_collective", -1))
        name, sizes = str(entry.get("profiling_name", "")), str(entry.get("input_sizes", ""))
        found.append(Collective(name, number, group, sizes, is_complete))
    return found
