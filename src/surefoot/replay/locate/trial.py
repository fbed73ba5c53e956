"""Tell rival origins apart by experiment: repair all but one, and see whether the outcome is still bad.

First everything that may have begun it is repaired, and what then comes to light is added, until the outcome is sound.
Then each is left bad alone: the earliest that breaks the outcome by itself is the answer. So a logarithm of zero in the
padding, which nobody reads, is not blamed for a division by zero further on.

A step that does not do the same again (it takes its batch from an iterator, or branches on what it sees) cannot be
asked this way; then the earliest candidate is the answer.
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
    """The earliest candidate that alone breaks the outcome; the earliest of all where that cannot be told."""
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
    """Whether the step did the same again as far as the earliest candidate."""
    end = max(upto.index, 0) + 1
    same_values = again.recorder.mended.get(upto.index) == upto.counts
    return same_values and first.recorder.calls[:end] == again.recorder.calls[:end]
