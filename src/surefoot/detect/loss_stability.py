"""`LossStabilityMonitor`: is the loss of the last window stable?

Everything is measured against the noise of the window itself (the median of successive differences), never against the
mean, so losses that are negative or cross zero are judged like any other. Only a rise counts: a loss that falls fast is
learning. The verdict is `insufficient_data`, `stable` or `unstable`; it comes with the window's mean, standard
deviation and slope, and with the step it was made at.

How bad a rise is depends on the scale of the run: the largest loss of its first window, or all it has gained since.
The first window counts from the first loss that is not 0, since zeros (no reward found yet) have no scale. A fast rise
out of the window's own noise is a warning from `diverged_factor` scales on. A slow one drowns in that noise, which
grows with it; so a level `runaway_factor` scales above the first one is a warning too, however it got there, and again
each time it has doubled. In between it is a remark: a value loss rises as returns do.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from surefoot.detect.windows import Window, host_float, noise, pushed, spread, trend
from surefoot.errors import require
from surefoot.types import Severity, Signals, Verdict

Status = Literal["insufficient_data", "stable", "unstable"]


class LossStabilityState(NamedTuple):
    """The last losses, the level and the scale the run started at, the lowest level since, and the last verdict."""

    window: Window = ()
    seen: int = 0
    first_level: float | None = None
    best_level: float | None = None
    scale: float = 0.0
    runaway_level: float | None = None
    """The level that was last called a runaway."""
    status: Status = "insufficient_data"
    severity: Severity = "info"


@dataclass(frozen=True)
class LossStabilityMonitor:
    """The loss of the last quarter of the window lies well above that of the quarters before."""

    window_steps: int = 100
    threshold: float = 6.0
    """How many noise widths the recent level must lie above the earlier one."""
    lost_share: float = 0.5
    """… and how much of what the run had gained (first level minus best level) it must have lost."""
    diverged_factor: float = 10.0
    """From a rise within the window of so many scales on, the verdict is a warning and not a remark."""
    runaway_factor: float = 100.0
    """… and from a level so many scales above the first one on, however slowly it got there."""
    every_steps: int = 8
    """How often the window is judged; in between the last verdict stands."""
    signal: str = "loss"

    def __post_init__(self) -> None:
        require(
            self.window_steps >= 8,
            f"`window_steps` must be at least 8 to compare a recent quarter with the rest; got {self.window_steps}. "
            "For a limit without history use `Explosion`.",
        )
        require(self.threshold > 0, f"`threshold` must be positive; got {self.threshold}.")
        require(self.lost_share >= 0, f"`lost_share` must not be negative; got {self.lost_share}.")
        require(self.diverged_factor > 0, f"`diverged_factor` must be positive; got {self.diverged_factor}.")
        require(self.runaway_factor > 0, f"`runaway_factor` must be positive; got {self.runaway_factor}.")
        require(self.every_steps >= 1, f"`every_steps` must be at least 1; got {self.every_steps}.")

    def init(self) -> LossStabilityState:
        """An empty window."""
        return LossStabilityState()

    def update(self, state: LossStabilityState, signals: Signals) -> tuple[LossStabilityState, Verdict]:
        """Take one loss in and judge the window."""
        loss = host_float(signals.get(self.signal))
        window = pushed(state.window, None if loss == 0.0 and not state.window else loss, self.window_steps)
        state = state._replace(window=window, seen=state.seen + 1)
        if len(window) < self.window_steps or (state.first_level is not None and state.seen % self.every_steps):
            return state, self._verdict(state, signals.step, {})
        split = len(window) * 3 // 4
        earlier, recent = median(window[:split]), median(window[split:])
        first = earlier if state.first_level is None else state.first_level
        best = earlier if state.best_level is None else state.best_level
        size = max(map(abs, window)) if state.first_level is None else state.scale
        scale = max(size, first - best)
        rise = recent - earlier
        needed = max(self.threshold * noise(window[:split]), self.lost_share * (first - best))
        slope, mean = trend(window)
        numbers = {
            "rise": rise,
            "needed": needed,
            "level": recent,
            "first_level": first,
            "mean": mean,
            "std": spread(window),
            "slope": slope,
        }
        lost, lost_before = recent - first, (state.runaway_level or first) - first
        runaway = lost > max(self.runaway_factor * scale, 2 * lost_before)
        unstable = rise > needed or runaway
        far = runaway or rise > self.diverged_factor * scale
        best = best if unstable else min(best, recent)
        status: Status = "unstable" if unstable else "stable"
        severity: Severity = "warning" if far else "info"
        runaway_level = recent if runaway else state.runaway_level
        state = LossStabilityState(window, state.seen, first, best, size, runaway_level, status, severity)
        return state, self._verdict(state, signals.step, numbers)

    def _verdict(self, state: LossStabilityState, step: int, numbers: dict[str, float]) -> Verdict:
        summary, unstable = "", state.status == "unstable"
        if unstable and numbers:
            summary = (
                f"{self.signal} rose by {numbers['rise']:.4g} within {self.window_steps} steps, "
                f"to {numbers['level']:.4g}; up to {numbers['needed']:.4g} would be its noise, "
                f"and it started at {numbers['first_level']:.4g}"
            )
        return Verdict(
            "loss_stability", unstable, state.severity, summary, {"status": state.status, "step": step, **numbers}
        )
