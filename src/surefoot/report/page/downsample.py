"""Downsampling: long series are reduced for the page without losing outliers.

A series is divided into intervals of equal length. The lowest, the highest and the first non-finite value of each
interval are kept, so that a spike of one step is visible at any zoom. The smoothed line is a running median of the last
values, followed by a running mean: a single bad value does not bend it, and it does not move before its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MOST_POINTS = 4_000
"""Points of a series on the page, in addition to those kept for events."""
SMOOTH_POINTS = 1_200
"""Points of a smoothed line."""


def kept(values: Numbers, most: int = MOST_POINTS) -> Numbers:
    """The indices to keep, in order: all of them for a short series."""
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
    """As `kept`, and every step that has an event."""
    chosen = kept(values, most)
    if len(chosen) == len(values):
        return chosen
    wanted = np.fromiter(events, dtype=np.int64)
    return np.union1d(chosen, np.flatnonzero(np.isin(steps, wanted)))


def smoothed(steps: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    """A smoothed line over the finite values of a series. Each point depends only on the values up to it.

    A centred window would make the line rise before the step that made the loss rise.
    """
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) < 12:
        return steps[:0], values[:0]
    width = -(-len(values) // SMOOTH_POINTS)
    if width > 1:
        ends = np.minimum(np.arange(width - 1, len(values) + width - 1, width), len(values) - 1)
        steps, values = steps[ends], _medians(values, width)
    # A sixtieth of the line, of a short one up to seven values: a longer window lags visibly.
    last = 2 * max(1, min(3, len(values) // 40), len(values) // 120) + 1
    return steps, _over_last(np.mean, _over_last(np.median, values, last), last // 2 + 1)


def _medians(values: Numbers, width: int) -> Numbers:
    """The median of each interval of `width` values; the last interval may be shorter."""
    whole = len(values) // width * width
    medians: Numbers = np.median(values[:whole].reshape(-1, width), axis=1)
    return medians if whole == len(values) else np.append(medians, np.median(values[whole:]))


def _over_last(combine: Callable[..., Numbers], values: Numbers, count: int) -> Numbers:
    """For each value, a number computed from it and those before it, `count` in total; fewer at the beginning."""
    first = [combine(values[:end]) for end in range(1, count)]
    return np.append(first, combine(np.lib.stride_tricks.sliding_window_view(values, count), axis=1))
