"""A loss that no longer falls (`Plateau`), or never did (`NoLearning`).

Both are remarks, not alarms: every run that ends well ends on a plateau, and a loss that says nothing about progress
(a GAN's, a policy gradient's) is flat all along.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from surefoot.detect.windows import Window, host_float, noise, pushed
from surefoot.errors import require
from surefoot.types import Signals, Verdict


class PlateauState(NamedTuple):
    """The last losses, how many have been seen, and the last verdict."""

    window: Window = ()
    seen: int = 0
    flat: bool = False


@dataclass(frozen=True)
class Plateau:
    """The loss of the second half of the window is not below that of the first half."""

    window_steps: int = 500
    min_gain: float = 0.05
    """How many noise widths the loss must fall over half a window not to be on a plateau."""

    def __post_init__(self) -> None:
        require(self.window_steps >= 8, f"`window_steps` must be at least 8; got {self.window_steps}.")
        require(self.min_gain >= 0, f"`min_gain` must not be negative; got {self.min_gain}.")

    def init(self) -> PlateauState:
        """An empty window."""
        return PlateauState()

    def update(self, state: PlateauState, signals: Signals) -> tuple[PlateauState, Verdict]:
        """Take one loss in; judge once per half window, since a verdict sorts it. In between the last one stands."""
        window = pushed(state.window, host_float(signals.loss), self.window_steps)
        half = self.window_steps // 2
        state = state._replace(window=window, seen=state.seen + 1)
        if len(window) < self.window_steps or state.seen % half:
            return state, Verdict("plateau", state.flat, "info")
        gain, width = median(window[:half]) - median(window[half:]), noise(window)
        state = state._replace(flat=gain <= self.min_gain * width)
        if not state.flat:
            return state, Verdict("plateau", False, "info")
        return state, Verdict(
            "plateau",
            True,
            "info",
            f"loss gained {gain:.3g} over {half} steps; its noise is {width:.3g}",
            {"gain": gain, "noise": width, "steps": half},
        )


class NoLearningState(NamedTuple):
    """The first losses, the last losses, whether the loss ever left its first level, and the last verdict."""

    first: Window = ()
    last: Window = ()
    learned: bool = False
    flat: bool = False


@dataclass(frozen=True)
class NoLearning:
    """After `after_steps` steps the loss has never left the level it started at."""

    after_steps: int = 1_000
    window_steps: int = 100

    def __post_init__(self) -> None:
        require(self.window_steps >= 8, f"`window_steps` must be at least 8; got {self.window_steps}.")
        require(
            self.after_steps >= 2 * self.window_steps,
            f"`after_steps` must be at least two windows; got {self.after_steps} with windows of {self.window_steps}.",
        )

    def init(self) -> NoLearningState:
        """Nothing seen."""
        return NoLearningState()

    def update(self, state: NoLearningState, signals: Signals) -> tuple[NoLearningState, Verdict]:
        """Take one loss in; judge once per window. In between the last verdict stands."""
        loss = host_float(signals.loss)
        if state.learned or loss is None:
            return state, Verdict("no_learning", state.flat, "info")
        if len(state.first) < self.window_steps:
            return state._replace(first=pushed(state.first, loss, self.window_steps)), Verdict(
                "no_learning", False, "info"
            )
        last = pushed(state.last, loss, self.window_steps)
        if len(last) < self.window_steps or signals.step % self.window_steps:
            return state._replace(last=last), Verdict("no_learning", state.flat, "info")
        fall, width = median(state.first) - median(last), noise(state.first)
        learned = fall > 0.5 * width
        state = NoLearningState(state.first, last, learned, flat=not learned and signals.step >= self.after_steps)
        if not state.flat:
            return state, Verdict("no_learning", False, "info")
        return state, Verdict(
            "no_learning",
            True,
            "info",
            f"after {signals.step} steps the loss is {median(last):.4g}; it started at {median(state.first):.4g}",
            {"first_level": median(state.first), "level": median(last), "noise": width},
        )
