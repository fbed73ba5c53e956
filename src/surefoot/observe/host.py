"""Memory of this process and of its machine, from `/proc`; numbers that a platform does not provide are left out.

In a container the machine's memory is not the limit, but that of the control group, where the kernel ends the process.
`host_total` is the smaller of the two, and `host_used` is counted against it, without file pages that the kernel would
free first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_NO_LIMIT = 1 << 60
"""A control group without a limit has `max` or, in version 1, a number nearly as large as an address."""


class HostMemory:
    """Reads the memory of the process and of the host. A control group's limit is looked up once."""

    def __init__(self, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._group = _tightest_group(proc, groups)

    def read(self) -> dict[str, float]:
        """`process_memory`, `host_used` and `host_total` in bytes, as far as they can be read."""
        numbers: dict[str, float] = {}
        own = self._process_memory()
        if own is not None:
            numbers["process_memory"] = own
        facts = _fields(self._proc / "meminfo")
        if "MemTotal:" in facts and "MemAvailable:" in facts:  # in KiB
            numbers["host_total"] = facts["MemTotal:"] * 1024
            numbers["host_used"] = (facts["MemTotal:"] - facts["MemAvailable:"]) * 1024
        if self._group is not None:
            numbers |= self._group.read(numbers.get("host_total", float("inf")))
        return numbers

    def _process_memory(self) -> float | None:
        try:
            return float((self._proc / "self" / "statm").read_text().split()[1]) * _PAGE
        except (OSError, ValueError, IndexError):
            return _largest_so_far()


def _largest_so_far() -> float | None:
    """Without `/proc`: the maximum memory of the process so far."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


class _Group:
    """One control group with a limit on memory."""

    def __init__(self, limit: int, current: Path, statistics: Path, reclaimable: str) -> None:
        self.limit = limit
        self._current, self._statistics, self._reclaimable = current, statistics, reclaimable

    def read(self, host_total: float) -> dict[str, float]:
        """Use and limit, if the limit is below the machine's memory."""
        used = _number(self._current)
        if used is None or self.limit >= host_total:
            return {}
        unreclaimable = used - _fields(self._statistics).get(self._reclaimable, 0)
        return {"host_total": float(self.limit), "host_used": float(max(0, unreclaimable))}


def _tightest_group(proc: Path, groups: Path) -> _Group | None:
    """The group with the smallest limit among the process's own and its parents."""
    found = [group for own in _own_groups(proc, groups) for group in _around(own, groups)]
    return min(found, key=lambda group: group.limit, default=None)


def _own_groups(proc: Path, groups: Path) -> list[Path]:
    """The paths of the process's groups, in version 2 (`0::/path`) and in version 1 (`4:memory:/path`)."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            found.append(groups / path.lstrip("/"))
        elif "memory" in controllers.split(","):
            found.append(groups / "memory" / path.lstrip("/"))
    return found


def _around(own: Path, groups: Path) -> list[_Group]:
    found = []
    # Inside a container the path may be the one outside, where only the root exists.
    for folder in (own, *own.parents):
        for limit_file, current, reclaimable in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(folder / limit_file)
            if limit is not None and 0 < limit < _NO_LIMIT:
                found.append(_Group(limit, folder / current, folder / "memory.stat", reclaimable))
        if folder == groups:
            break
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # `max` is not a number: no limit
        return None


def _fields(path: Path) -> dict[str, int]:
    """A file of lines `name number …`."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
