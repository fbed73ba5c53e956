"""The bins of every histogram in a run log: powers of two, on both sides of zero.

Fixed bins make histograms of different steps and tensors comparable, and are cheap to compute: a value's bin is its
exponent. From the middle outwards:

- `ZERO`: exact zeros only. A dead unit is not the same as a small one.
- next to it on each side, everything smaller than 2^-30;
- then one bin per power of two, [2^k, 2^(k+1)), mirrored for negative values;
- the outermost bin on each side also holds everything beyond 2^16.

NaN and Inf are in no bin; a histogram counts them separately. Needs neither torch nor numpy.
"""

from __future__ import annotations

SMALLEST_POWER = -30
LARGEST_POWER = 16

_SIDE = (5e-324, *(2.0**power for power in range(SMALLEST_POWER, LARGEST_POWER + 1)))
"""Edges of one side. The first is the smallest number above zero, so that zero has its own bin."""

EDGES: tuple[float, ...] = (*(-edge for edge in reversed(_SIDE)), *_SIDE)
"""`COUNT + 1` increasing edges. A bin contains its edge nearer to zero, but not the other; `ZERO` contains neither."""

COUNT = len(EDGES) - 1
ZERO = COUNT // 2
