"""Several signals far above their own recent past at the same step, by a robust z-score.

For each signal the last `window_steps` accepted values give a median and a spread (the interquartile range over 1.349,
which is the standard deviation of a normal distribution and does not see the tails). A value is an outlier when it is

- more than `threshold` spreads above the median, and
- further above the median than `factor` times the furthest the run has been from its median, a maximum that fades
  slowly. A run with heavy tails has shown them before; this is what keeps it from being flagged; and
- further than the highest it has been above its median, times how heavy that tail is. The number of spreads the record
  lies out tells: with a power law, the gap to the next record is a power of it. The square root is taken, up to
  `max_tail_factor`. Only values above the median count here: a loss that falls fast has no heavy upper tail; and
- more than `min_rise` of the median itself, so that a stream that hardly varies has no spikes of rounding noise.

The step is anomalous when every named signal is an outlier at once: one signal alone is an alarm at most, never a
reason to act. A refused value enters neither the window nor the maximum, each signal by itself; a level that stays for
`patience` steps is accepted as the new one.

Values that are exactly 0 have no scale: a reward not yet found or a kept margin is followed by a first real value
without being its baseline. They enter the window, but neither count as steps nor let the maximum fade. The maximum
fades, and refusals add up, as in `Explosion`, for the same reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from surefoot.detect.arrays import Array, Library, library_of
from surefoot.detect.records import fade, forgive
from surefoot.errors import require
from surefoot.types import Signals, Verdict

IQR_OF_NORMAL = 1.349
FORGIVEN = 0.001
"""What one healthy step takes off the count of refusals."""
_TINY = 1e-30
"""Keeps a spread of 0 from dividing; representable in fp32 and lost in any real spread."""


class SpikeState(NamedTuple):
    """A row per signal."""

    window: Array
    """The last accepted values, oldest first; NaN where there is none yet."""
    accepted: Array
    """How many values other than 0 were accepted."""
    furthest: Array
    """Fading maximum of the distance from the median."""
    highest: Array
    """… and of the distance above it."""
    refused: Array


@dataclass(frozen=True)
class Spike:
    """Every one of `signals` is far above its own recent past at the same step."""

    signals: tuple[str, ...] = ("loss", "grad_norm")
    window_steps: int = 128
    threshold: float = 10.0
    """Robust z-score beyond which a value is an outlier."""
    factor: float = 5.0
    """… and how many times further out than the run has been."""
    max_tail_factor: float = 50.0
    """… and how many times higher at most, when the tail is heavy."""
    min_rise: float = 0.1
    """… and by how much of the median's size."""
    half_life_steps: float = 2_000.0
    """The furthest distance halves over this many steps, or over as many as the run has behind it, if that is more."""
    min_steps: int = 50
    """Accepted values other than 0 before there is a verdict."""
    patience: int = 3
    """After so many refusals within about a thousand steps, values of that kind are the run's own and accepted: unlike
    an explosion, a spike of ordinary size that keeps coming back is something to learn from."""

    def __post_init__(self) -> None:
        require(
            not isinstance(self.signals, str),
            f"`signals` is a tuple of names; got the string {self.signals!r}. Write `Spike(({self.signals!r},))`.",
        )
        require(len(self.signals) > 0, "`signals` is empty; name at least one, such as ('loss', 'grad_norm').")
        require(
            self.window_steps >= 4,
            f"`window_steps` must be at least 4 to have quartiles; got {self.window_steps}. "
            "For a limit without history use `Explosion`.",
        )
        require(self.threshold > 0, f"`threshold` must be positive; got {self.threshold}.")
        require(self.factor >= 1, f"`factor` must be at least 1; got {self.factor}.")
        require(self.max_tail_factor >= 1, f"`max_tail_factor` must be at least 1; got {self.max_tail_factor}.")
        require(self.min_rise >= 0, f"`min_rise` must not be negative; got {self.min_rise}.")
        require(self.half_life_steps > 0, f"`half_life_steps` must be positive; got {self.half_life_steps}.")
        require(self.min_steps >= 4, f"`min_steps` must be at least 4 to have quartiles; got {self.min_steps}.")
        require(self.patience >= 1, f"`patience` must be at least 1; got {self.patience}.")

    def init(self) -> SpikeState:
        """An empty window per signal."""
        rows = len(self.signals)
        return SpikeState(np.full((rows, self.window_steps), np.nan), *(np.zeros(rows) for _ in range(4)))

    def update(self, state: SpikeState, signals: Signals) -> tuple[SpikeState, Verdict]:
        """Judge one step."""
        xp = library_of(signals)
        values = xp.stack([xp.scalar(signals.get(name)) for name in self.signals])
        window, accepted, furthest, highest, refused = (xp.own(part) for part in state)
        low, median, high = quartiles(xp, window)
        distance, spread = values - median, (high - low) / IQR_OF_NORMAL
        tail = xp.sqrt(highest / (spread + _TINY)).clip(1.0, self.max_tail_factor)
        bar = xp.maximum(self.threshold * spread, self.factor * furthest)
        bar = xp.maximum(xp.maximum(bar, tail * highest), self.min_rise * xp.abs(median))
        finite = xp.is_finite(values)
        outlier = (distance > bar) & (accepted >= self.min_steps) & finite
        taken = finite & (~outlier | (refused >= self.patience))
        telling = taken & (values != 0)
        moved = xp.concatenate([window[:, 1:], values[:, None]], 1)
        kept = fade(accepted, self.half_life_steps)
        next_state = SpikeState(
            xp.where(taken[:, None], moved, window),
            accepted + telling,
            xp.where(telling, xp.fmax(furthest * kept, xp.abs(distance)), furthest),  # ignores a NaN median
            xp.where(telling, xp.fmax(highest * kept, distance), highest),
            xp.where(taken, forgive(refused, outlier, FORGIVEN), refused + outlier),
        )
        return next_state, Verdict("spike", (outlier & ~taken).all(), severity="warning")


def quartiles(xp: Library, window: Array) -> tuple[Array, Array, Array]:
    """Lower quartile, median and upper quartile of the values of each row that are there.

    By sorting, and not with `torch.nanmedian`, which has no deterministic form on CUDA.
    """
    filled = xp.is_finite(window).sum(1)
    places = (filled[:, None] - 1).clip(0) * xp.quarters()
    picked = xp.pick(xp.sort_rows(window), places)
    return picked[:, 0], picked[:, 1], picked[:, 2]
