"""Clipping on so many steps that it acts as a learning rate. A remark: clipping low can be on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from surefoot.detect.windows import Window, host_float, pushed
from surefoot.errors import require
from surefoot.types import Signals, Verdict


class ClippingState(NamedTuple):
    """The last clip factors, and how many of them are below 1."""

    window: Window = ()
    clipped: int = 0


@dataclass(frozen=True)
class ClippingSaturated:
    """More than `share` of the window's steps were clipped."""

    window_steps: int = 200
    share: float = 0.5

    def __post_init__(self) -> None:
        require(self.window_steps >= 2, f"`window_steps` must be at least 2; got {self.window_steps}.")
        require(0 < self.share < 1, f"`share` must lie between 0 and 1; got {self.share}.")

    def init(self) -> ClippingState:
        """No step seen."""
        return ClippingState()

    def update(self, state: ClippingState, signals: Signals) -> tuple[ClippingState, Verdict]:
        """Judge one step."""
        factor = host_float(signals.clip_factor)
        window = pushed(state.window, factor, self.window_steps)
        entered = window is not state.window  # what is not finite does not
        leaving = entered and len(state.window) == self.window_steps and state.window[0] < 1.0
        clipped = state.clipped + (entered and window[-1] < 1.0) - leaving
        state = ClippingState(window, clipped)
        if len(window) < self.window_steps or clipped <= self.share * len(window):
            return state, Verdict("clipping_saturated", False, "info")
        typical = median(window)
        return state, Verdict(
            "clipping_saturated",
            True,
            "info",
            f"{clipped} of the last {len(window)} steps were clipped, typically to {typical:.2g} of their size",
            {"clipped": clipped, "steps": len(window), "typical_factor": typical},
        )
