"""Clipping on so many steps that it acts as a learning rate. A remark: clipping low can be on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from surefoot.detect.windows import Window, host_float, pushed
from surefoot.errors import require
from surefoot.types import Signals, Verdict


@dataclass(frozen=True)
class ClippingSaturated:
    """More than `share` of the window's steps were clipped."""

    window_steps: int = 200
    share: float = 0.5

    def __post_init__(self) -> None:
        require(self.window_steps >= 2, f"`window_steps` must be at least 2; got {self.window_steps}.")
        require(0 < self.share < 1, f"`share` must lie between 0 and 1; got {self.share}.")

    def init(self) -> Window:
        """No step seen."""
        return ()

    def update(self, state: Window, signals: Signals) -> tuple[Window, Verdict]:
        """Judge one step."""
        state = pushed(state, host_float(signals.clip_factor), self.window_steps)
        clipped = sum(factor < 1.0 for factor in state)
        if len(state) < self.window_steps or clipped <= self.share * len(state):
            return state, Verdict("clipping_saturated", False, "info")
        typical = median(state)
        return state, Verdict(
            "clipping_saturated",
            True,
            "info",
            f"{clipped} of the last {len(state)} steps were clipped, typically to {typical:.2g} of their size",
            {"clipped": clipped, "steps": len(state), "typical_factor": typical},
        )
