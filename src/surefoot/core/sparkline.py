"""A curve for a line of text or a small image: a history of fixed size, and the characters that draw it.

`SparkCurve` keeps a whole run in at most `SLOTS` averages. When they are full, neighbours are joined and each
represents twice as many steps, so the first step stays in the picture for any length of run. Positions depend on the
step and not on the count: a thinned log has the same shape. NaN and Inf never enter an average: their slot is drawn as
a cross.

One value of 1e20 would flatten everything else. Values that are few and far from all others are therefore excluded from
the scale and drawn as an arrow. There is no axis: the numbers are next to the curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

SLOTS = 128
_BLOCKS, _BLOCKS_ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_BROKEN, _BROKEN_ASCII = "×", "x"
_ABOVE, _ABOVE_ASCII = "↑", "^"
_BELOW, _BELOW_ASCII = "↓", "v"
_LARGEST = 1e150  # beyond it, sums and differences of floats would overflow
_FEW = 0.05
_FAR = 5.0
_ENOUGH = 6  # with fewer values no outlier can be identified


@dataclass
class Slot:
    """Some consecutive values: how many were finite, their mean, and whether one was not finite."""

    count: int = 0
    mean: float = 0.0
    broken: bool = False

    def add(self, value: float) -> None:
        """Add one value."""
        if not math.isfinite(value):
            self.broken = True
            return
        self.count += 1
        self.mean += (max(-_LARGEST, min(_LARGEST, value)) - self.mean) / self.count

    def joined(self, other: Slot) -> Slot:
        """Both together."""
        count = self.count + other.count
        mean = self.mean + (other.mean - self.mean) * (other.count / count) if count else 0.0
        return Slot(count, mean, self.broken or other.broken)


class SparkCurve:
    """The history of one number by step, in at most `SLOTS` slots."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._first = 0
        self._steps_per_slot = 1

    def add(self, step: int, value: float) -> None:
        """Add the value of a step. If the step is not after the last one, it replaces the later steps."""
        if not self._slots or step < self._first:
            self._slots, self._first, self._steps_per_slot = [], step, 1
        while (step - self._first) // self._steps_per_slot >= SLOTS:
            self._slots = [_all_joined(self._slots[index : index + 2]) for index in range(0, len(self._slots), 2)]
            self._steps_per_slot *= 2
        index = (step - self._first) // self._steps_per_slot
        if index + 1 != len(self._slots):
            del self._slots[index + 1 :]
            self._slots += [Slot() for _ in range(index + 1 - len(self._slots))]
        self._slots[index].add(value)

    @property
    def first_step(self) -> int:
        """The step that the curve begins with."""
        return self._first

    def slots(self, width: int) -> list[Slot]:
        """The history in at most `width` slots of equal length; a slot without values repeats the one before."""
        count = len(self._slots)
        edges = [index * count // width for index in range(width + 1)] if count > width else list(range(count + 1))
        joined = [_all_joined(self._slots[low:high]) for low, high in pairwise(edges)]
        return list(accumulate(joined, _or_before))


def sparkline(slots: Sequence[Slot], ascii_only: bool = False) -> str:
    """One character per slot: a block as high as its mean, a cross if a value was not finite, an arrow if off scale."""
    blocks = _BLOCKS_ASCII if ascii_only else _BLOCKS
    broken, above, below = (_BROKEN_ASCII, _ABOVE_ASCII, _BELOW_ASCII) if ascii_only else (_BROKEN, _ABOVE, _BELOW)
    low, high = scale_of([slot.mean for slot in slots if slot.count])
    marks, settled = [], False
    for slot in slots:
        height = _height(slot.mean, low, high, len(blocks))
        settled = settled or (slot.count > 0 and 0 <= height < len(blocks))
        if slot.broken or not slot.count:
            marks.append(broken)
        elif height >= len(blocks):
            marks.append(above if settled else blocks[-1])  # a loss that starts high has not jumped
        else:
            marks.append(blocks[height] if height >= 0 else below)
    return "".join(marks)


def _height(value: float, low: float, high: float, levels: int) -> int:
    """The level of a value: negative below the scale, and too high above it."""
    if value < low:
        return -1
    if value > high:
        return levels
    return min(levels - 1, int((value - low) / (high - low) * levels)) if high > low else levels // 2 - 1


def scale_of(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and highest value of a picture: all values, except for those that are few and far from the others."""
    if not values:
        return 0.0, 0.0
    ordered = sorted(values)
    few = math.ceil(_FEW * len(ordered)) if len(ordered) >= _ENOUGH else 0
    inner = ordered[few : len(ordered) - few] or ordered
    reach = _FAR * max(inner[-1] - inner[0], 0.1 * max(abs(inner[0]), abs(inner[-1])))
    near = [value for value in ordered if inner[0] - reach <= value <= inner[-1] + reach]
    return near[0], near[-1]


def _or_before(before: Slot, slot: Slot) -> Slot:
    return slot if slot.count or slot.broken else before


def _all_joined(slots: Sequence[Slot]) -> Slot:
    joined = slots[0]
    for slot in slots[1:]:
        joined = joined.joined(slot)
    return joined
