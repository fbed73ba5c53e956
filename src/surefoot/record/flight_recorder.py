"""The last collectives of this process, as torch's flight recorder holds them.

torch keeps a ring of the collectives that were started, for NCCL and, in newer versions, for gloo. It is read from
another thread and needs neither the device nor the other ranks. Where torch has no recorder, or it is switched off
(`TORCH_FR_BUFFER_SIZE=0`, `TORCH_NCCL_TRACE_BUFFER_SIZE=0`), nothing is found.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

_READERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Of NCCL, and of the other backends."""
MOST_ENTRIES = 64


@dataclass(frozen=True)
class Collective:
    """A collective that this rank has started."""

    name: str
    """With its backend, such as `nccl:all_reduce`."""
    number: int
    """It counts the collectives of its process group."""
    group: str
    sizes: str
    is_complete: bool
    """Whether the recorder knows that it has ended."""

    def __str__(self) -> str:
        state = "" if self.is_complete else ", not complete"
        return f"{self.name} number {self.number} of group {self.group}, sizes {self.sizes}{state}"


def recorded_collectives() -> list[Collective]:
    """The last collectives of this process, the oldest first; empty where they are not recorded."""
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    found: list[Collective] = []
    for reader in (getattr(module, name, None) for name in _READERS):
        if reader is not None:
            try:
                found += collectives_of(json.loads(reader(includeCollectives=True, onlyActive=False)))
            except (RuntimeError, TypeError, ValueError):  # other arguments in this version, or no recorder
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
