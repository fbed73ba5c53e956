"""Robust statistics of short windows of floats, for the detectors that look back."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

Window = tuple[float, ...]


def pushed(window: Window, value: float | None, length: int) -> Window:
    """The window with one more value, at most `length` of them. What is not finite does not enter."""
    if value is None or not math.isfinite(value):
        return window
    return (*window[-(length - 1) :], value)


def noise(window: Window) -> float:
    """Standard deviation of the noise around a slow trend, from the median of successive differences."""
    if len(window) < 2:
        return 0.0
    steps = [abs(b - a) for a, b in pairwise(window)]
    return median(steps) / (0.6745 * math.sqrt(2))


def autocorrelation(window: Window) -> float:
    """Correlation of each value with the next, around a straight line through the window. 0 for a constant."""
    n = len(window)
    slope, middle = trend(window)
    rest = [value - (middle + slope * (i - (n - 1) / 2)) for i, value in enumerate(window)]
    total = math.fsum(r * r for r in rest)
    if total == 0.0:
        return 0.0
    return math.fsum(a * b for a, b in pairwise(rest)) / total


def trend(window: Window) -> tuple[float, float]:
    """Least-squares slope per step, and the mean."""
    n = len(window)
    mean = math.fsum(window) / n
    centre = (n - 1) / 2
    spread = math.fsum((i - centre) ** 2 for i in range(n))
    slope = math.fsum((i - centre) * (value - mean) for i, value in enumerate(window)) / spread if spread else 0.0
    return slope, mean


def spread(window: Window) -> float:
    """Standard deviation of the window."""
    mean = math.fsum(window) / len(window)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in window) / len(window))


def host_float(value: object) -> float | None:
    """A signal as a float. The detectors that look back run on the host, where this reads nothing off a device."""
    return None if value is None else float(value)  # type: ignore[arg-type]
