"""Detectors of the user's own: one that fails is left out, and training goes on.

Anything with `init` and `update` is a detector, so anything may be raised or returned by one, at the first step or at
the ten-thousandth. Watching never kills: what fails is named in one warning and judges nothing from then on.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch import Tensor

from surefoot.detect.combine import SEVERITIES, AfterWarmup, Combined, Sustained
from surefoot.types import Detector, Signals, Verdict

log = logging.getLogger("surefoot")


def tolerated(detector: Any) -> Any:
    """The same detector, with what is the user's own in it left out when it fails; ours are not expected to."""
    if isinstance(detector, Combined):
        return replace(detector, parts=tuple(map(tolerated, detector.parts)))
    if isinstance(detector, (Sustained, AfterWarmup)):
        return replace(detector, detector=tolerated(detector.detector))
    return detector if type(detector).__module__.startswith("surefoot.detect.") else UserDetector(detector)


class UserDetector:
    """A detector of the user's. It prints as the one it is made of."""

    def __init__(self, detector: Detector) -> None:
        self._detector, self._failed = detector, False

    def init(self) -> Any:
        """The detector's own state."""
        return self._detector.init()

    def update(self, state: Any, signals: Signals) -> tuple[Any, Verdict]:
        """What the detector says; nothing is wrong with a step once it has failed."""
        if not self._failed:
            try:
                new, verdict = self._detector.update(state, signals)
                return new, _checked(verdict, signals)
            except Exception as error:
                self._failed = True
                log.warning(
                    "surefoot: step %d: the detector %r failed and is left out from now on (%s: %s); training goes on.",
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
    """The verdict, in the form that all others have."""
    if not isinstance(verdict, Verdict):
        raise TypeError(f"`update` must return (state, Verdict); got {verdict!r} in place of the verdict")
    if verdict.severity not in SEVERITIES:
        raise ValueError(f"the severity of a verdict must be one of {', '.join(SEVERITIES)}; got {verdict.severity!r}")
    device, anomalous = signals.device, verdict.anomalous
    if device is None or not isinstance(anomalous, Tensor):
        return replace(verdict, anomalous=bool(anomalous))
    return replace(verdict, anomalous=anomalous.detach().reshape(()).to(device) != 0)
