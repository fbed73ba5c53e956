"""`judge_losses`: finds problems in a list of recorded losses, such as a column of a log.

From the fiftieth loss on, `Spike` judges, as during training. Before that it has no tail to compare with. A recorded
list is often shorter, so until then a loss is a spike if it is far out of proportion to every earlier loss:
`SHORT_FACTOR` times further above the highest of them than they differ among themselves, and by more than their median.
At least three losses must precede it.

Later losses are not compared with a spike; a level that lasts for three losses is the new baseline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.settings import shown
from surefoot.detect.monitors import LossStabilityMonitor
from surefoot.detect.step_rules import Spike
from surefoot.errors import UsageError
from surefoot.types import Incident, Signals

if TYPE_CHECKING:
    from torch import Tensor

SHORT_FACTOR = 8.0
"""In a short list, the distance of a spike from the highest earlier loss, in multiples of their range."""
FEWEST_BEFORE = 3
PATIENCE = 3
"""After this many consecutive losses, a level is the run's own."""
_RULE = Spike(("loss",))


def judge_losses(losses: Iterable[float | Tensor]) -> list[Incident]:
    """Find the problems in recorded losses, oldest first; an empty list if there are none.

    Kinds are `nonfinite`, `spike`, and `loss` if a long curve rises well above its own noise. Steps are positions in
    the list. A problem that lasts for several steps is one incident, with the last of them in its evidence.

    >>> for found in judge_losses([2.3, 2.1, 1.60, 9.80, float("nan"), float("nan"), 1.5]):
    ...     print(found.step, found.kind, "-", found.summary)
    3 spike - the loss jumps to 9.8; the median of the 3 before it is 2.1
    4 nonfinite - the loss is nan, and so is the next one
    """
    if not isinstance(losses, Iterable) or isinstance(losses, str):
        raise UsageError(f"`losses` must be a list of numbers; got {shown(losses)}.")
    values = [_number(loss, step) for step, loss in enumerate(losses)]
    judge = _RecordedLosses()
    judged = [judge.kind_of(step, value) for step, value in enumerate(values)]
    found = list(judge.rises)
    for kind, steps in groupby(range(len(values)), key=lambda step: judged[step][0]):
        if kind is not None:
            lasting = list(steps)
            found.append(_incident(kind, lasting, values, *judged[lasting[0]][1:]))
    return sorted(found, key=lambda incident: incident.step)


class _RecordedLosses:
    """Processes one loss after the other."""

    def __init__(self) -> None:
        self._accepted: deque[float] = deque(maxlen=_RULE.window_steps)
        self._count = self._refused = 0
        self._spikes, self._curve = _RULE.init(), LossStabilityMonitor().init()
        self.rises: list[Incident] = []

    def kind_of(self, step: int, value: float) -> tuple[str | None, float, int]:
        """The problem of a loss, with the median of the losses that it was compared with, and their number."""
        if not math.isfinite(value):
            return "nonfinite", math.nan, 0
        self._watch_curve(step, value)
        typical, before = median(self._accepted) if self._accepted else math.nan, len(self._accepted)
        if self._is_spike(step, value):
            self._refused += 1
            return "spike", typical, before
        self._refused = 0
        self._accepted.append(value)
        self._count += 1
        return None, math.nan, 0

    def _is_spike(self, step: int, value: float) -> bool:
        signals = Signals(step, loss=value)
        if self._count >= _RULE.min_steps:
            self._spikes, verdict = _RULE.update(self._spikes, signals)
            return bool(verdict.anomalous)
        short = self._count >= FEWEST_BEFORE and self._refused < PATIENCE and self._is_out_of_proportion(value)
        if not short:
            self._spikes, _ = _RULE.update(self._spikes, signals)
        return short

    def _is_out_of_proportion(self, value: float) -> bool:
        highest, typical = max(self._accepted), median(self._accepted)
        far = value - highest > SHORT_FACTOR * (highest - min(self._accepted))
        return far and value - typical > abs(typical)

    def _watch_curve(self, step: int, value: float) -> None:
        self._curve, verdict = LossStabilityMonitor().update(self._curve, Signals(step, loss=value))
        if verdict.anomalous and verdict.severity != "info" and not self.rises:
            self.rises.append(Incident(step, "loss", verdict.severity, verdict.summary, evidence=verdict.evidence))


def _incident(kind: str, steps: list[int], values: list[float], typical: float, before: int) -> Incident:
    first, loss = steps[0], values[steps[0]]
    evidence: dict[str, object] = {"loss": loss, "last_step": steps[-1]}
    if kind == "nonfinite":
        lasts = ", and so is the next one" if len(steps) == 2 else f", and so are the next {len(steps) - 1}"
        summary = f"the loss is {loss}{lasts if len(steps) > 1 else ''}"
        return Incident(first, kind, "error", summary, evidence=evidence)
    lasts = f", and stays high for {len(steps)} steps" if len(steps) > 1 else ""
    summary = f"the loss jumps to {loss:.4g}{lasts}; the median of the {before} before it is {typical:.4g}"
    return Incident(first, kind, "warning", summary, evidence=evidence | {"median_before": typical})


def _number(loss: object, step: int) -> float:
    try:
        if isinstance(loss, (str, bytes)):
            raise TypeError
        return float(loss)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"`losses` takes numbers; got {loss!r} at position {step}.") from None
