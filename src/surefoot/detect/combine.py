"""Small functions that combine detectors, and the wrapper around the user's own detectors.

Anything with `init` and `update` is a detector, so a user's detector may raise or return anything, at any step.
`tolerated` wraps it: if it fails, one warning names it, it is ignored from then on, and training continues.

>>> import surefoot as sf
>>> rule = sf.any_of(sf.NonFinite(), sf.sustained(sf.Spike(("loss",)), steps=3))
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_
from typing import Any, Literal

import numpy as np
from torch import Tensor

from surefoot.core.settings import check_types
from surefoot.detect.step_rules import library_of
from surefoot.errors import require
from surefoot.types import Detector, Severity, Signals, Verdict

log = logging.getLogger("surefoot")
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")


def require_detector(where: str, part: object) -> None:
    """Raise `SettingError` unless `part` is a detector: an object, not a class, with `init` and `update`."""
    require(
        isinstance(part, Detector) and not isinstance(part, type),
        f"`{where}` takes a detector such as `NonFinite()`, an object with `init` and `update`; got {part!r}.",
    )


@dataclass(frozen=True)
class Combined:
    """Several detectors combined; made by `any_of` and `all_of`."""

    parts: tuple[Detector, ...]
    rule: Literal["any", "all"]

    def __post_init__(self) -> None:
        require(len(self.parts) > 0, f"`{self.rule}_of()` needs at least one detector; got none.")
        for part in self.parts:
            require_detector(f"{self.rule}_of()", part)

    def init(self) -> tuple[Any, ...]:
        """The states of the parts."""
        return tuple(part.init() for part in self.parts)

    def update(self, state: tuple[Any, ...], signals: Signals) -> tuple[tuple[Any, ...], Verdict]:
        """Let every part judge the step: each keeps its own baseline, independent of the others."""
        results = [part.update(own, signals) for part, own in zip(self.parts, state, strict=True)]
        verdicts = tuple(verdict for _, verdict in results)
        anomalous = reduce(or_ if self.rule == "any" else and_, (verdict.anomalous for verdict in verdicts))
        combined = Verdict(
            f"{self.rule}_of",
            anomalous,
            severity=_worst(verdicts, known=signals.device is None),
            summary="; ".join(verdict.summary for verdict in verdicts if verdict.summary),
            parts=verdicts,
        )
        return tuple(own for own, _ in results), combined


def _worst(verdicts: tuple[Verdict, ...], known: bool) -> Severity:
    """The worst severity among the anomalous verdicts; among all verdicts if that is not known on the host."""
    raised = [verdict for verdict in verdicts if verdict.anomalous] if known else []
    return SEVERITIES[max(SEVERITIES.index(verdict.severity) for verdict in raised or verdicts)]


def any_of(*detectors: Detector) -> Combined:
    """Anomalous if at least one of the detectors is anomalous."""
    return Combined(detectors, "any")


def all_of(*detectors: Detector) -> Combined:
    """Anomalous if all of the detectors are anomalous at the same step."""
    return Combined(detectors, "all")


@dataclass(frozen=True)
class Sustained:
    """A detector that must be anomalous for several consecutive steps; made by `sustained`."""

    detector: Detector
    steps: int

    def __post_init__(self) -> None:
        check_types(self)
        require_detector("sustained()", self.detector)
        require(self.steps >= 1, f"`steps` must be at least 1; got {self.steps}.")

    def init(self) -> tuple[Any, Any]:
        """The detector's state, and the number of consecutive anomalous steps."""
        return self.detector.init(), np.zeros(())

    def update(self, state: tuple[Any, Any], signals: Signals) -> tuple[tuple[Any, Any], Verdict]:
        """Judge one step."""
        own, verdict = self.detector.update(state[0], signals)
        xp = library_of(signals)
        run = xp.where(xp.own(verdict.anomalous) > 0, xp.own(state[1]) + 1, 0.0)
        lasted = run >= self.steps
        summary = verdict.summary if xp.device is not None or lasted else ""
        return (own, run), replace(verdict, anomalous=lasted, summary=summary, parts=())


def sustained(detector: Detector, steps: int) -> Sustained:
    """Anomalous once the detector has been anomalous for `steps` consecutive steps."""
    return Sustained(detector, steps)


@dataclass(frozen=True)
class AfterWarmup:
    """A detector that learns but raises no alarm at first; made by `after_warmup`."""

    detector: Detector
    steps: int

    def __post_init__(self) -> None:
        check_types(self)
        require_detector("after_warmup()", self.detector)
        require(self.steps >= 0, f"`steps` must not be negative; got {self.steps}.")

    def init(self) -> Any:
        """The detector's own state."""
        return self.detector.init()

    def update(self, state: Any, signals: Signals) -> tuple[Any, Verdict]:
        """Judge one step; healthy until `steps` of them have passed."""
        state, verdict = self.detector.update(state, signals)
        if signals.step < self.steps:
            verdict = replace(verdict, anomalous=verdict.anomalous & False, summary="", parts=())
        return state, verdict


def after_warmup(detector: Detector, steps: int) -> AfterWarmup:
    """Let the detector learn for `steps` steps before it may raise an alarm."""
    return AfterWarmup(detector, steps)


def tolerated(detector: Any) -> Any:
    """The same detector, with the user's own parts disabled if they fail; surefoot's are not expected to."""
    if isinstance(detector, Combined):
        return replace(detector, parts=tuple(map(tolerated, detector.parts)))
    if isinstance(detector, (Sustained, AfterWarmup)):
        return replace(detector, detector=tolerated(detector.detector))
    return detector if type(detector).__module__.startswith("surefoot.detect.") else UserDetector(detector)


class UserDetector:
    """A detector of the user. It prints like the one that it wraps."""

    def __init__(self, detector: Detector) -> None:
        self._detector, self._failed = detector, False

    def init(self) -> Any:
        """The detector's own state."""
        return self._detector.init()

    def update(self, state: Any, signals: Signals) -> tuple[Any, Verdict]:
        """The verdict of the detector; after a failure, every step counts as healthy."""
        if not self._failed:
            try:
                new, verdict = self._detector.update(state, signals)
                return new, _checked(verdict, signals)
            except Exception as error:
                self._failed = True
                log.warning(
                    "surefoot: step %d: the detector %r failed and is disabled (%s: %s); training continues.",
                    signals.step,
                    self._detector,
                    type(error).__name__,
                    error,
                    exc_info=error,
                )
        return state, Verdict(type(self._detector).__name__, False)

    def __repr__(self) -> str:
        return repr(self._detector)


def _checked(verdict: Any, signals: Signals) -> Verdict:
    """The verdict in the common form."""
    if not isinstance(verdict, Verdict):
        raise TypeError(f"`update` must return (state, Verdict); got {verdict!r} in place of the verdict")
    if verdict.severity not in SEVERITIES:
        raise ValueError(f"the severity of a verdict must be one of {', '.join(SEVERITIES)}; got {verdict.severity!r}")
    device, anomalous = signals.device, verdict.anomalous
    if device is None or not isinstance(anomalous, Tensor):
        return replace(verdict, anomalous=bool(anomalous))
    return replace(verdict, anomalous=anomalous.detach().reshape(()).to(device) != 0)
