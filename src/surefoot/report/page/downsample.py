"""Fewer points, the same picture: long series are thinned for the page so that nothing that stands out is lost.

A series is cut into stretches of equal length, and of each the lowest value, the highest, and the first that is not
finite are kept, so that a spike one step wide is still there at any zoom. The smoothed line is a running median, then
a running mean: one bad value does not bend it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MOST_POINTS = 4_000
"""Points that a series has on the page, besides those kept for an event."""
SMOOTH_POINTS = 1_200
"""Points of a smoothed line."""


def kept(values: Numbers, most: int = MOST_POINTS) -> Numbers:
    """The positions to keep, in order: all of them in a short series."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    width = -(-count // (most // 3))
    blocks = -(-count // width)
    starts = np.arange(blocks) * width
    padded = np.full(blocks * width, np.nan)
    padded[:count] = values
    table = padded.reshape(blocks, width)
    finite = np.isfinite(table)
    real = (np.arange(blocks * width) < count).reshape(blocks, width)
    odd = ~finite & real
    wanted = [
        np.array([0, count - 1]),
        (starts + np.where(finite, table, np.inf).argmin(axis=1))[finite.any(axis=1)],
        (starts + np.where(finite, table, -np.inf).argmax(axis=1))[finite.any(axis=1)],
        (starts + odd.argmax(axis=1))[odd.any(axis=1)],
    ]
    return np.unique(np.concatenate(wanted))


def kept_with(steps: Numbers, values: Numbers, events: Iterable[int], most: int = MOST_POINTS) -> Numbers:
    """As `kept`, and every step at which something happened."""
    chosen = kept(values, most)
    if len(chosen) == len(values):
        return chosen
    wanted = np.fromiter(events, dtype=np.int64)
    return np.union1d(chosen, np.flatnonzero(np.isin(steps, wanted)))


def smoothed(steps: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    """A line through the middle of a noisy series, over its finite values."""
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) < 12:
        return steps[:0], values[:0]
    width = -(-len(values) // SMOOTH_POINTS)
    if width > 1:
        steps, values = steps[width // 2 :: width], _medians(values, width)
        steps = steps[: len(values)]
        values = values[: len(steps)]
    reach = max(1, min(25, len(values) // 60))
    padded = np.pad(values, reach, mode="edge")
    middle = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1), axis=1)
    return steps, _running_mean(middle, reach)


def _medians(values: Numbers, width: int) -> Numbers:
    whole = len(values) // width * width
    medians: Numbers = np.median(values[:whole].reshape(-1, width), axis=1)
    return medians if whole == len(values) else np.append(medians, np.median(values[whole:]))


def _running_mean(values: Numbers, reach: int) -> Numbers:
    padded = np.pad(values, reach, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    mean: Numbers = windows.mean(axis=1)
    return mean
