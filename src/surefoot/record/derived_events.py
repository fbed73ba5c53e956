"""Events that are derived from the numbers: the learning rate jumps, clipping begins.

The log's own thread finds them, so they cost the training loop nothing and are the same for every source.
"""

from __future__ import annotations

import math
from collections import deque

from surefoot.record.messages import Event, StepRow

LR_JUMP = 2.5
"""The factor between the learning rates of two steps that counts as a jump. The first steps of a warm-up double it."""
SMALLEST_LR = 1e-30
"""A smaller rate counts as zero: a warm-up or a pause rather than a jump."""
SMALLEST_MOVE = 1e-3
"""A share of the highest rate so far: the last steps of a cosine fall by large factors without effect."""
BURST_STEPS, BURST_CLIPPED = 10, 8
"""Clipping begins when this many of this many steps are clipped,"""
BEFORE_STEPS, BEFORE_SHARE = 100, 0.25
"""and less than this share of the steps before them were."""


class Derived:
    """Follows the steps of one part of a run."""

    def __init__(self) -> None:
        self._lr: float | None = None
        self._highest_lr = 0.0
        self._last: deque[bool] = deque(maxlen=BURST_STEPS)
        self._before: deque[bool] = deque(maxlen=BEFORE_STEPS)
        self._bursting = False

    def take(self, row: StepRow) -> list[Event]:
        """The events for a step."""
        return [*self._lr_jump(row), *self._clip_burst(row)]

    def _lr_jump(self, row: StepRow) -> list[Event]:
        before, self._lr = self._lr, row.lr
        if (
            before is None
            or row.lr is None
            or not SMALLEST_LR < before < math.inf
            or not SMALLEST_LR < row.lr < math.inf
        ):
            return []
        self._highest_lr = max(self._highest_lr, before)
        ratio = row.lr / before
        if 1 / LR_JUMP <= ratio <= LR_JUMP or abs(row.lr - before) < SMALLEST_MOVE * self._highest_lr:
            return []
        way = f"{ratio:,.3g} times" if ratio > 1 else f"1/{1 / ratio:,.3g} of"
        summary = f"the learning rate is {row.lr:.3g}, {way} the {before:.3g} of the previous step"
        return [_event("lr-change", row, summary, {"before": before, "after": row.lr})]

    def _clip_burst(self, row: StepRow) -> list[Event]:
        if row.clip_factor is None or row.skipped:
            return []
        if len(self._last) == BURST_STEPS:
            self._before.append(self._last[0])
        self._last.append(row.clip_factor < 1.0)
        clipped = sum(self._last)
        if self._bursting:
            self._bursting = clipped > BURST_STEPS - BURST_CLIPPED
            return []
        usual = sum(self._before) / len(self._before) if self._before else 1.0
        if clipped < BURST_CLIPPED or len(self._before) < BEFORE_STEPS or usual >= BEFORE_SHARE:
            return []
        self._bursting = True
        summary = f"{clipped} of the last {BURST_STEPS} steps were clipped; before that {usual:.0%} were"
        return [_event("clip-burst", row, summary, {"clipped": clipped, "of": BURST_STEPS, "share_before": usual})]


def _event(name: str, row: StepRow, summary: str, evidence: dict[str, float]) -> Event:
    return Event(name, row.step, summary, row.time, part=row.part, evidence=evidence)  # type: ignore[arg-type]
