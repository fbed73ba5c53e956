"""Decide between several origins by experiment: repair all but one, and check whether the result is still bad.

First every possible origin is repaired, and origins that then become visible are added, until the result is finite.
Then each is left bad alone: the earliest that makes the result bad by itself is the origin. So a logarithm of zero in
the padding, which is never used, is not reported instead of a later division by zero.

A step that behaves differently when run again (it takes its batch from an iterator, or branches on values) cannot be
tested in this way; the earliest candidate is then used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.replay.locate.find import OriginSearch
    from surefoot.replay.locate.memory_writes import MemoryWrite

_MOST_CANDIDATES = 6
_ROUNDS = 3


def choose(first: OriginSearch, rerun: Callable[[set[int]], OriginSearch]) -> MemoryWrite:
    """The earliest candidate that alone makes the result bad; the earliest of all if that cannot be decided."""
    level = first.level
    candidates = first.candidates(level)
    rivals = _by_index(candidates)
    if first.error is not None:
        return candidates[0]
    for _ in range(_ROUNDS):
        repaired = rerun(set(rivals))
        if not _same_program(first, repaired, candidates[0]):
            return candidates[0]
        still = repaired.candidates(level)
        if repaired.error is None and not still:
            return _breaks_alone(rivals, level, rerun)
        rivals = {**_by_index(still), **rivals}
    return candidates[0]


def _breaks_alone(rivals: dict[int, MemoryWrite], level: int, rerun: Callable[[set[int]], OriginSearch]) -> MemoryWrite:
    in_order = sorted(rivals, key=lambda index: (index >= 0, abs(index)))
    if len(rivals) > 1:
        for index in in_order:
            if rerun(set(rivals) - {index}).candidates(level):
                return rivals[index]
    return rivals[in_order[0]]


def _by_index(candidates: list[MemoryWrite]) -> dict[int, MemoryWrite]:
    return {record.index: record for record in candidates[:_MOST_CANDIDATES]}


def _same_program(first: OriginSearch, again: OriginSearch, upto: MemoryWrite) -> bool:
    """Whether the step ran the same operations again up to the earliest candidate."""
    end = max(upto.index, 0) + 1
    same_values = again.recorder.mended.get(upto.index) == upto.counts
    return same_values and first.recorder.calls[:end] == again.recorder.calls[:end]
