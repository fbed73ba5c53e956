"""`StabilityChecker`: one overall verdict from all monitors.

Its first three detectors judge a single step with tensor operations; `TrainingStabilizer` uses them to decide, on the
device, whether the step is applied. So do the limits, if any is set. The other detectors look back over many steps and
only raise alarms, except for `setback` and `lost_progress`, which are used by `TrainingRecovery` only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from surefoot.core.settings import is_number, shown
from surefoot.detect.combine import Combined, require_detector
from surefoot.detect.monitors import (
    ClippingSaturated,
    LossStabilityMonitor,
    NoLearning,
    Oscillation,
    Plateau,
    Vanishing,
)
from surefoot.detect.step_rules import Explosion, Limit, LostProgress, NonFinite, Setback, Spike
from surefoot.errors import require
from surefoot.types import Detector, Signals, Verdict

_STEP_RULES = ("nonfinite", "explosion", "spike")
_FOR_RECOVERY = ("setback", "lost_progress")
_LIMITS: dict[str, Literal["grad_norm", "grad_ratio", "loss"]] = {
    "max_grad_norm": "grad_norm",
    "max_grad_ratio": "grad_ratio",
    "max_loss": "loss",
}


@dataclass(frozen=True)
class StabilityChecker:
    """Every monitor's verdict, and a combined one: anomalous if any monitor raises more than an info.

    Each field is a detector with its own documented thresholds; pass another one, or `None` to disable it. The last
    three are limits in absolute numbers, in addition to the detectors, which compare a run with itself. None is set by
    default.
    """

    nonfinite: Detector | None = field(default_factory=NonFinite)
    """Refuses a step whose loss or gradient is NaN or Inf."""
    explosion: Detector | None = field(default_factory=Explosion)
    """Refuses a step whose gradient is far beyond all earlier ones."""
    spike: Detector | None = field(default_factory=Spike)
    """Refuses a step at which loss and gradient norm are outliers together."""
    loss: Detector | None = field(default_factory=LossStabilityMonitor)
    """Reports a loss that has risen well above its own noise."""
    vanishing: Detector | None = field(default_factory=Vanishing)
    """Reports first layers that get almost no gradient."""
    oscillation: Detector | None = field(default_factory=Oscillation)
    """Reports a loss that alternates from step to step."""
    plateau: Detector | None = field(default_factory=Plateau)
    """Notes that the loss no longer falls."""
    no_learning: Detector | None = field(default_factory=NoLearning)
    """Notes that the loss has never fallen."""
    clipping: Detector | None = field(default_factory=ClippingSaturated)
    """Notes that most steps are clipped."""
    setback: Detector | None = field(default_factory=Setback)
    """Counted by `TrainingRecovery` in addition to refused steps; `None` for losses that do not measure progress."""
    lost_progress: Detector | None = field(default_factory=LostProgress)
    """… and so is this rule, which compares mean losses and is not affected by the noise of small batches."""
    max_grad_norm: float | None = None
    """A step with a larger gradient norm is refused, independent of the run. `None`: no such limit."""
    max_grad_ratio: float | None = None
    """… and one whose gradient norm exceeds this multiple of the norm of the parameters."""
    max_loss: float | None = None
    """… and one with a larger loss."""

    def __post_init__(self) -> None:
        for name in self._detectors():
            if getattr(self, name) is not None:
                require_detector(name, getattr(self, name))
        for name in _LIMITS:
            limit = getattr(self, name)
            require(
                limit is None or (is_number(limit) and 0 < limit < math.inf),
                f"`{name}` must be a positive finite number, or None for no limit; got {shown(limit)}.",
            )

    def _detectors(self) -> list[str]:
        return [each.name for each in fields(self) if each.name not in _LIMITS]

    def _limits(self) -> tuple[Limit, ...]:
        values = {signal: getattr(self, name) for name, signal in _LIMITS.items()}
        return tuple(Limit(signal, value) for signal, value in values.items() if value is not None)

    def __repr__(self) -> str:
        """The detectors, and the limits that are set."""
        shown = [
            name for name in (*self._detectors(), *_LIMITS) if name not in _LIMITS or getattr(self, name) is not None
        ]
        return f"StabilityChecker({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def step_rules(self) -> tuple[Detector, ...]:
        """The enabled detectors that judge a single step, on the device."""
        return (*self._those(lambda name: name in _STEP_RULES), *self._limits())

    @property
    def look_back(self) -> tuple[Detector, ...]:
        """The enabled detectors that look back over many steps, on the host."""
        return self._those(lambda name: name not in (*_STEP_RULES, *_FOR_RECOVERY))

    def _those(self, wanted: Any) -> tuple[Detector, ...]:
        found = (getattr(self, name) for name in self._detectors() if wanted(name))
        return tuple(detector for detector in found if detector is not None)

    def init(self) -> tuple[Any, ...]:
        """The states of the detectors."""
        return tuple(detector.init() for detector in self.step_rules + self.look_back)

    def update(self, state: tuple[Any, ...], signals: Signals) -> tuple[tuple[Any, ...], Verdict]:
        """Let every monitor judge the step."""
        detectors = self.step_rules + self.look_back
        if not detectors:
            return state, Verdict("stability", False)
        state, verdict = Combined(detectors, "any").update(state, signals)
        raised = [part for part in verdict.parts if part.severity != "info" and bool(part.anomalous)]
        return state, Verdict(
            "stability",
            bool(raised),
            "error" if any(part.severity == "error" for part in raised) else "warning",
            "; ".join(part.summary or part.detector for part in raised),
            parts=verdict.parts,
        )
