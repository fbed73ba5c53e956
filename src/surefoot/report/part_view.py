"""One optimizer of a run in the terminal: its last numbers, its loss curve, its pace.

The size is fixed, however long the run is. A row may contain `None`, NaN, Inf or a step lower than the last one; none
of these raises or affects later rows.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.sparkline import SparkCurve

if TYPE_CHECKING:
    from surefoot.record.messages import StepRow

SMOOTHED_OVER = 31
"""The smoothed loss is the median of this many: unlike an average, it is not moved by one spike."""
PACE_SECONDS = 10.0
_PACE_GAP = 0.2
_PACE_LEAST = 2.0


class Pace:
    """Steps per second over the last seconds, from the times in the rows, so batching of rows has no effect."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=int(PACE_SECONDS / _PACE_GAP) + 2)

    def add(self, time: float, step: int) -> None:
        """Record the time of a step."""
        if not math.isfinite(time):
            return
        if self._marks and (step <= self._marks[-1][1] or time < self._marks[-1][0]):
            self._marks.clear()  # resumed, rolled back, or the clock was changed: earlier times are not comparable
        if len(self._marks) >= 2 and time - self._marks[-2][0] < _PACE_GAP:
            self._marks[-1] = (time, step)
        else:
            self._marks.append((time, step))
        # The second condition keeps enough rows; the first alone would let one long pause count for a long time.
        while (
            len(self._marks) > 2 and time - self._marks[0][0] > PACE_SECONDS and time - self._marks[1][0] > _PACE_LEAST
        ):
            self._marks.popleft()

    def reset(self) -> None:
        """Start over after a pause."""
        self._marks.clear()

    @property
    def steps_per_second(self) -> float | None:
        """`None` until two steps were taken at different times."""
        if len(self._marks) < 2:
            return None
        (first_time, first), (last_time, last) = self._marks[0], self._marks[-1]
        return (last - first) / (last_time - first_time) if last_time > first_time else None


class PartView:
    """One optimizer of the run."""

    def __init__(self) -> None:
        self.step = 0
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self.lr: float | None = None
        self.loss_scale: float | None = None
        self.skips = 0
        self.curve = SparkCurve()
        self.pace = Pace()
        self._recent: deque[float] = deque(maxlen=SMOOTHED_OVER)
        self._clips_possible = 0
        self._clips = 0

    def add(self, row: StepRow) -> None:
        """Add a step. Values that it does not have stay as they were."""
        self.step = row.step
        self.pace.add(row.time, row.step)
        self.skips += row.skipped
        if row.loss is not None:
            self.loss = row.loss
            self.curve.add(row.step, row.loss)
            if math.isfinite(row.loss):
                self._recent.append(row.loss)
        if row.clip_factor is not None:
            self._clips_possible += 1
            self._clips += row.clip_factor < 1
        self.grad_norm = self.grad_norm if row.grad_norm is None else row.grad_norm
        self.lr = self.lr if row.lr is None else row.lr
        self.loss_scale = self.loss_scale if row.loss_scale is None else row.loss_scale

    @property
    def smoothed(self) -> float | None:
        """The median of the last finite losses."""
        return median(self._recent) if self._recent else None

    @property
    def clip_share(self) -> float | None:
        """The share of steps whose gradient was clipped; `None` if nothing clips."""
        return self._clips / self._clips_possible if self._clips_possible else None
