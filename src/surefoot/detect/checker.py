"""`StabilityChecker`: one overall verdict from all monitors.

Its first three detectors judge a single step with tensor operations; `TrainingStabilizer` lets them decide, on the
device, whether the step is applied. The others look back over a stretch and only raise alarms, but for `setback`, which
is for `TrainingRecovery` and says nothing without one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from surefoot.detect.combine import Combined, require_detector
from surefoot.detect.monitors import (
    ClippingSaturated,
    LossStabilityMonitor,
    NoLearning,
    Oscillation,
    Plateau,
    Vanishing,
)
from surefoot.detect.step_rules import Explosion, NonFinite, Setback, Spike
from surefoot.types import Detector, Signals, Verdict

_STEP_RULES = ("nonfinite", "explosion", "spike")


@dataclass(frozen=True)
class StabilityChecker:
    """Every monitor's verdict, and one over all: anomalous when any monitor raises more than a remark.

    Each field is a detector with its own documented thresholds; give another one, or `None` to leave it out.
    """

    nonfinite: Detector | None = field(default_factory=NonFinite)
    explosion: Detector | None = field(default_factory=Explosion)
    spike: Detector | None = field(default_factory=Spike)
    loss: Detector | None = field(default_factory=LossStabilityMonitor)
    vanishing: Detector | None = field(default_factory=Vanishing)
    oscillation: Detector | None = field(default_factory=Oscillation)
    plateau: Detector | None = field(default_factory=Plateau)
    no_learning: Detector | None = field(default_factory=NoLearning)
    clipping: Detector | None = field(default_factory=ClippingSaturated)
    setback: Detector | None = field(default_factory=Setback)
    """What `TrainingRecovery` counts beside refused steps; `None` for losses that do not measure progress."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is not None:
                require_detector(each.name, getattr(self, each.name))

    @property
    def step_rules(self) -> tuple[Detector, ...]:
        """The detectors that are on and judge a single step, on the device."""
        return self._those(lambda name: name in _STEP_RULES)

    @property
    def look_back(self) -> tuple[Detector, ...]:
        """The detectors that are on and look back over a stretch, on the host."""
        return self._those(lambda name: name not in (*_STEP_RULES, "setback"))

    def _those(self, wanted: Any) -> tuple[Detector, ...]:
        found = (getattr(self, each.name) for each in fields(self) if wanted(each.name))
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
