"""A loss that has lost a good share of what the run had gained: is the model still the one that was trained?

One high loss says little, a bad batch has it too. This rule therefore does not act by itself; `TrainingRecovery` counts
how many steps in a row it says so. A loss is a setback when it lies

- above every accepted loss of the last `window_steps` steps, and
- more than `threshold` spreads (robust, as in `Spike`) above their median, and
- higher than the median by `share` of everything the run has gained since its first steps. This is what tells a model
  that was damaged from a schedule that restarts, from dropout that is switched on, from a slightly harder data set:
  those cost some of the gain, and the run is on its way again.

Values that are judged a setback do not enter the window; a level that stays for `accept_after` steps does, since
whoever could have done something about it has had the time. Losses that are 0, negative or cross zero are judged by
differences, never by ratios.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from surefoot.detect.arrays import Array, library_of
from surefoot.detect.spike import IQR_OF_NORMAL, quartiles
from surefoot.errors import require
from surefoot.types import Signals, Verdict

FIRST_STEPS = 5
"""The first accepted losses, whose mean is where the run started."""


class SetbackState(NamedTuple):
    """The last accepted losses, where the run started, how many were accepted, how many in a row were not."""

    window: Array
    start: Array
    accepted: Array
    run: Array


@dataclass(frozen=True)
class Setback:
    """The loss is above everything of the last window, and a good share of what was gained is gone."""

    window_steps: int = 64
    threshold: float = 3.0
    """How many spreads above the median of the window."""
    share: float = 0.3
    """… and how much of what was gained (first losses minus the median of the window) must be lost."""
    min_steps: int = 32
    """Accepted losses before there is a verdict."""
    accept_after: int = 100
    """After so many in a row, the level is the run's new one."""
    signal: str = "loss"

    def __post_init__(self) -> None:
        require(
            self.window_steps >= 8, f"`window_steps` must be at least 8 to have quartiles; got {self.window_steps}."
        )
        require(self.threshold > 0, f"`threshold` must be positive; got {self.threshold}.")
        require(self.share >= 0, f"`share` must not be negative; got {self.share}.")
        require(
            8 <= self.min_steps <= self.window_steps,
            f"`min_steps` must lie between 8 and `window_steps`; got {self.min_steps} of {self.window_steps}.",
        )
        require(self.accept_after >= 1, f"`accept_after` must be at least 1; got {self.accept_after}.")

    def init(self) -> SetbackState:
        """An empty window."""
        return SetbackState(np.full((1, self.window_steps), np.nan), *(np.zeros(()) for _ in range(3)))

    def update(self, state: SetbackState, signals: Signals) -> tuple[SetbackState, Verdict]:
        """Judge one step."""
        xp = library_of(signals)
        value = xp.scalar(signals.get(self.signal))
        window, start, accepted, run = (xp.own(part) for part in state)
        low, median, high = (row[0] for row in quartiles(xp, window))
        highest = xp.where(xp.is_finite(window), window, -np.inf).max()
        bar = xp.maximum(highest, median + self.threshold * (high - low) / IQR_OF_NORMAL)
        bar = xp.maximum(bar, median + self.share * xp.maximum(start - median, 0 * start))
        finite = xp.is_finite(value)
        above = (value > bar) & (accepted >= self.min_steps) & finite
        taken = finite & (~above | (run >= self.accept_after))
        moved = xp.concatenate([window[:, 1:], value.reshape(1, 1)], 1)
        first = taken & (accepted < FIRST_STEPS)
        next_state = SetbackState(
            xp.where(taken, moved, window),
            xp.where(first, (start * accepted + value) / (accepted + 1), start),
            accepted + taken,
            xp.where(above, run + 1, xp.where(finite, 0 * run, run)),
        )
        return next_state, Verdict("setback", above & ~taken, severity="warning")
