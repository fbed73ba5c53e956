"""A loss that jumps up and down from step to step instead of falling.

Period two shows as a strongly negative correlation of each loss with the next. That alone is no alarm: two batches that
take turns do the same, and so does full-batch descent at the edge of stability. It is worth a remark when the run gains
nothing and the jumps are as large as a good part of everything it has gained since the start. It is a warning only when
the loss alternates around a level well above the one it started at: two tasks that take turns also jump without
falling, for as long as they please, but they do not lose ground. Weights that bounce do.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from surefoot.detect.windows import Window, autocorrelation, host_float, pushed
from surefoot.errors import require
from surefoot.types import Severity, Signals, Verdict


class OscillationState(NamedTuple):
    """The last losses, the level the run started at, how many judgements in a row were anomalous, and how much so."""

    window: Window = ()
    seen: int = 0
    first_level: float | None = None
    run: int = 0
    severity: Severity = "info"


@dataclass(frozen=True)
class Oscillation:
    """Successive losses alternate, widely, and the loss does not fall."""

    window_steps: int = 64
    correlation: float = -0.7
    """Correlation of successive losses below which they alternate. White noise gives about 0 +- 0.13."""
    share: float = 0.5
    """How large the jumps must be, as a share of what the run has gained since the start."""
    lost_ground: float = 0.5
    """How far above its first level the loss must lie for a warning, in jumps. Below that it is a remark."""
    every_steps: int = 8
    """How often the window is judged."""
    times: int = 3
    """How many judgements in a row it must hold."""

    def __post_init__(self) -> None:
        require(
            self.window_steps >= 16,
            f"`window_steps` must be at least 16 to have a correlation; got {self.window_steps}.",
        )
        require(-1 < self.correlation < 0, f"`correlation` must lie between -1 and 0; got {self.correlation}.")
        require(self.share > 0, f"`share` must be positive; got {self.share}.")
        require(self.lost_ground >= 0, f"`lost_ground` must not be negative; got {self.lost_ground}.")
        require(self.every_steps >= 1, f"`every_steps` must be at least 1; got {self.every_steps}.")
        require(self.times >= 1, f"`times` must be at least 1; got {self.times}.")

    def init(self) -> OscillationState:
        """An empty window."""
        return OscillationState()

    def update(self, state: OscillationState, signals: Signals) -> tuple[OscillationState, Verdict]:
        """Judge one step."""
        window = pushed(state.window, host_float(signals.loss), self.window_steps)
        state = state._replace(window=window, seen=state.seen + 1)
        if len(window) < self.window_steps or state.seen % self.every_steps:
            return state, Verdict("oscillation", state.run >= self.times, state.severity)
        half = self.window_steps // 2
        before, now = median(window[:half]), median(window[half:])
        first = before if state.first_level is None else state.first_level
        jump = median(abs(b - a) for a, b in pairwise(window))
        correlation = autocorrelation(window)
        wide = jump > self.share * max(first - now, 0.0) and jump > 0.01 * abs(now)
        run = state.run + 1 if correlation < self.correlation and wide and now > before - 0.1 * jump else 0
        severity: Severity = "warning" if now - first > self.lost_ground * jump else "info"
        next_state = OscillationState(window, state.seen, first, run, severity)
        if run < self.times:
            return next_state, Verdict("oscillation", False)
        return next_state, Verdict(
            "oscillation",
            True,
            severity,
            f"loss alternates by {jump:.4g} a step around {now:.4g} and does not fall (correlation {correlation:.2f})",
            {"jump": jump, "level": now, "first_level": first, "correlation": correlation},
        )
