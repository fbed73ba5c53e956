"""Go back from a bad result to its origin.

An operation is an origin if no input was bad, if it makes more bad values than its inputs explain, or if it made NaN
from intended infinities: a softmax over a row that is all -Inf. An infinity that the program requested (a mask) is not
an origin while it is only passed on; if it reaches the loss, it is.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from surefoot.replay.locate.call import base_name
from surefoot.replay.locate.evidence import SOFTMAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from surefoot.replay.locate.memory_writes import MemoryWrite


def origins(ends: Iterable[MemoryWrite], *, meant_too: bool) -> list[MemoryWrite]:
    """The candidates for the first bad operation behind some records, earliest first.

    They made a bad value that none of their inputs explains. If there are none, it is the operation that turned an
    intended infinity into NaN; if there is none either, with `meant_too`, the infinity itself.
    """
    reached = list(_ancestors(ends))
    meant = _meant_at(reached)
    found = [record for record in reached if record.born or (not record.parents and record not in meant)]
    found = found or [record for record in reached if record.parents and record.makes_nan]
    if not found and meant_too:
        found = [record for record in reached if not record.parents]
    return sorted(found, key=lambda record: (record.index >= 0, abs(record.index)))


def unsure(ends: Iterable[MemoryWrite]) -> bool:
    """Whether NaN was made where intended infinities were also inputs: there may then be two faults."""
    reached = list(_ancestors(ends))
    meant = _meant_at(reached)
    makers = [record for record in reached if record.parents and record.makes_nan]
    return any(record in meant for maker in makers for record in _ancestors([maker]))


def path(origin: MemoryWrite, ends: Iterable[MemoryWrite]) -> list[MemoryWrite]:
    """The shortest way from an origin to one of the ends, both included."""
    following: dict[MemoryWrite, MemoryWrite | None] = dict.fromkeys(ends)
    waiting = deque(following)
    while waiting and origin not in following:
        record = waiting.popleft()
        for parent in record.parents:
            if parent not in following:
                following[parent] = record
                waiting.append(parent)
    way = [origin]
    while (record_after := following.get(way[-1])) is not None:
        way.append(record_after)
    return way


def leads_to(origin: MemoryWrite, ends: Iterable[MemoryWrite]) -> bool:
    """Whether a bad value could get from an origin to one of the ends."""
    return any(record is origin for record in _ancestors(ends))


def _ancestors(ends: Iterable[MemoryWrite]) -> Iterable[MemoryWrite]:
    waiting = list(ends)
    seen: set[MemoryWrite] = set()
    while waiting:
        record = waiting.pop()
        if record not in seen:
            seen.add(record)
            yield record
            waiting += record.parents


def _meant_at(reached: list[MemoryWrite]) -> set[MemoryWrite]:
    """The intended infinities; a tensor of -Inf counts as a mask if a softmax made NaN from it."""
    softmax_choked = any(record.makes_nan and base_name(record.op) in SOFTMAX for record in reached)
    return {record for record in reached if record.meant or (record.mask_like and softmax_choked)}
