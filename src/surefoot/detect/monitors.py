"""The monitors that look back over many steps: the loss curve, the gradients of early layers, clipping.

They use plain floats, run on the host a few steps after the step itself, and only raise alarms. The first functions are
the robust statistics of a short window that they share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

from surefoot.core.settings import check_types
from surefoot.errors import require
from surefoot.types import LayerStats, Severity, Signals, Verdict

Window = tuple[float, ...]


def pushed(window: Window, value: float | None, length: int) -> Window:
    """The window with one more value, at most `length` of them. Non-finite values are left out."""
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
    """A signal as a float. These detectors run on the host, so this does not read from a device."""
    return None if value is None else float(value)  # type: ignore[arg-type]


Status = Literal["insufficient_data", "stable", "unstable"]


class LossStabilityState(NamedTuple):
    """The last losses, the initial level and scale of the run, the lowest level since, and the last verdict."""

    window: Window = ()
    seen: int = 0
    first_level: float | None = None
    best_level: float | None = None
    scale: float = 0.0
    runaway_level: float | None = None
    """The level that was last reported as a runaway."""
    status: Status = "insufficient_data"
    severity: Severity = "info"


@dataclass(frozen=True)
class LossStabilityMonitor:
    """The loss of the last quarter of the window is well above that of the quarters before.

    Everything is measured against the noise of the window itself (the median of successive differences), never against
    the mean, so losses that are negative or cross zero are judged like any other. Only a rise counts: a loss that falls
    fast is learning. The verdict is `insufficient_data`, `stable` or `unstable`; it includes the window's mean,
    standard deviation and slope, and its step.

    The severity of a rise depends on the scale of the run: the largest loss of its first window, or all it has gained
    since. The first window counts from the first loss that is not 0, because zeros (no reward found yet) have no scale.
    A fast rise above the window's own noise is a warning from `diverged_factor` scales on. A slow one is hidden by that
    noise, which grows with it; so a level `runaway_factor` scales above the first one is a warning too, however it was
    reached, and again each time it has doubled. In between it is an info: a value loss rises as returns do.
    """

    window_steps: int = 100
    """The number of losses in the window."""
    threshold: float = 6.0
    """The number of noise widths by which the recent level must exceed the earlier one."""
    lost_share: float = 0.5
    """… and the share of the gain of the run (first level minus best level) that must be lost."""
    diverged_factor: float = 10.0
    """From a rise within the window of this many scales on, the verdict is a warning and not an info."""
    runaway_factor: float = 100.0
    """… and from a level this many scales above the first one on, however slowly it was reached."""
    every_steps: int = 8
    """The number of steps between two judgements; in between the last verdict is returned."""
    signal: str = "loss"
    """The signal that is judged."""

    def __post_init__(self) -> None:
        check_types(self)
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
        """Add one loss and judge the window."""
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


class OscillationState(NamedTuple):
    """The last losses, the initial level, the number of consecutive anomalous judgements, and their size."""

    window: Window = ()
    seen: int = 0
    first_level: float | None = None
    run: int = 0
    severity: Severity = "info"


@dataclass(frozen=True)
class Oscillation:
    """Successive losses alternate widely, and the loss does not fall.

    Period two shows as a strongly negative correlation of each loss with the next. That alone is no alarm: two
    alternating batches do the same, and so does full-batch descent at the edge of stability. It is an info if the run
    gains nothing and the jumps are as large as a good part of everything it has gained since the start. It is a warning
    only if the loss alternates around a level well above its first one: two alternating tasks also jump without
    falling, indefinitely, but they do not lose progress. Weights that oscillate do.
    """

    window_steps: int = 64
    """The number of losses in the window."""
    correlation: float = -0.7
    """The correlation of successive losses below which they alternate. White noise gives about 0 ± 0.13."""
    share: float = 0.5
    """The minimum size of the jumps, as a share of the gain of the run since the start."""
    lost_ground: float = 0.5
    """The distance from the first level, in jumps, from which it is a warning. Below that it is an info."""
    every_steps: int = 8
    """The number of steps between two judgements."""
    times: int = 3
    """The number of consecutive judgements for which it must hold."""

    def __post_init__(self) -> None:
        check_types(self)
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


class PlateauState(NamedTuple):
    """The last losses, their number, and the last verdict."""

    window: Window = ()
    seen: int = 0
    flat: bool = False


@dataclass(frozen=True)
class Plateau:
    """The loss of the second half of the window is not below that of the first half."""

    window_steps: int = 500
    """The number of losses in the window."""
    min_gain: float = 0.05
    """The number of noise widths by which the loss must fall over half a window not to be on a plateau."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.window_steps >= 8, f"`window_steps` must be at least 8; got {self.window_steps}.")
        require(self.min_gain >= 0, f"`min_gain` must not be negative; got {self.min_gain}.")

    def init(self) -> PlateauState:
        """An empty window."""
        return PlateauState()

    def update(self, state: PlateauState, signals: Signals) -> tuple[PlateauState, Verdict]:
        """Add one loss; judge once per half window, which sorts it. In between the last verdict is returned."""
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
    """After `after_steps` steps the loss has never left its initial level."""

    after_steps: int = 1_000
    """The number of steps that a run has to leave its first level."""
    window_steps: int = 100
    """The number of losses for the first level, and for the present one."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.window_steps >= 8, f"`window_steps` must be at least 8; got {self.window_steps}.")
        require(
            self.after_steps >= 2 * self.window_steps,
            f"`after_steps` must be at least two windows; got {self.after_steps} with windows of {self.window_steps}.",
        )

    def init(self) -> NoLearningState:
        """Nothing seen."""
        return NoLearningState()

    def update(self, state: NoLearningState, signals: Signals) -> tuple[NoLearningState, Verdict]:
        """Add one loss; judge once per window. In between the last verdict is returned."""
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


@dataclass(frozen=True)
class Vanishing:
    """The first layers' gradients are below `ratio` of the last layers', for `steps` consecutive steps.

    The ratio between layers of the same step is used, not the size: at the end of a good run every gradient is small.
    Only weights of rank two and more are compared, and the ratio must stay tiny, so that zero-initialised branches,
    whose gradients are 0 for a step or two, raise no alarm. A layer whose gradient is exactly 0 is another problem (a
    dead or detached layer) and is ignored here.
    """

    ratio: float = 1e-6
    """The ratio of first to last gradient norm below which the gradient has vanished."""
    steps: int = 50
    """The number of consecutive steps."""

    def __post_init__(self) -> None:
        check_types(self)
        require(0 < self.ratio < 1, f"`ratio` must lie between 0 and 1; got {self.ratio}.")
        require(self.steps >= 1, f"`steps` must be at least 1; got {self.steps}.")

    def init(self) -> int:
        """The number of consecutive steps with a tiny ratio."""
        return 0

    def update(self, state: int, signals: Signals) -> tuple[int, Verdict]:
        """Judge one step. Without per-layer norms there is no verdict."""
        healthy = Verdict("vanishing", False)
        if signals.layers is None or (host_float(signals.nonfinite) or 0) > 0:
            return state, healthy
        if not self._may_have_vanished(signals.layers) or len(weights := signals.layers.weights()) < 3:
            return 0, healthy
        (first_name, first), (last_name, last) = weights[0], weights[-1]
        if last == 0.0 or first >= self.ratio * last:
            return 0, healthy
        run = state + 1
        if run < self.steps:
            return run, healthy
        return run, Verdict(
            "vanishing",
            True,
            "warning",
            f"gradient of {first_name} is {first / last:.2g} of that of {last_name}, for {run} steps",
            {"first": first_name, "last": last_name, "first_norm": first, "last_norm": last, "steps": run},
        )

    def _may_have_vanished(self, layers: LayerStats) -> bool:
        """Whether a weight's gradient is tiny beside the largest one: asked first, because every step asks."""
        norms = [norm for norm, rank in zip(layers.grad_norm.tolist(), layers.ranks, strict=True) if rank >= 2]
        return bool(norms) and not min(norms) >= self.ratio * max(norms)


class ClippingState(NamedTuple):
    """The last clip factors, and the number of those below 1."""

    window: Window = ()
    clipped: int = 0


@dataclass(frozen=True)
class ClippingSaturated:
    """More than `share` of the window's steps were clipped.

    This is an `info` and not a warning, because a low clipping threshold can be intended.
    """

    window_steps: int = 200
    """The number of steps in the window."""
    share: float = 0.5
    """The share of clipped steps above which it is reported."""

    def __post_init__(self) -> None:
        check_types(self)
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
