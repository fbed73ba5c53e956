"""Detects ranks that are slower than the others for minutes, from times that each rank measures by itself.

Ranks that average gradients at every step take equally long for one, because the fast ones wait for the slow one. So a
rank measures the part of a step in which it does not wait, from the end of a step to the beginning of the next
backward: loading data and the forward. The median over the last steps is in its `alive.json`. The first rank reads the
files of the others at intervals and compares them. No collective is needed.

The median ignores what happens in a few steps only: evaluations, checkpoints.

Not covered: a slow backward or optimizer with an equally fast forward. On a GPU the host's time is measured, which ends
when the forward is queued: a slow device affects it when the queue is full, or the loss is read at every step.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.record.heartbeat import Beat

STEPS = 64
"""The number of steps of the median."""
FEWEST_STEPS = 20
ROUNDS = 4
"""The number of consecutive comparisons that must find the same rank."""
SLOWER = 1.25
"""The factor by which a straggler's time before its backward must exceed that of the others,"""
LOST_SHARE = 0.1
"""and the difference is at least this share of a whole step."""
SMALLEST_MS = 1.0


class StepClock:
    """Measures the steps of this rank. Called by the thread that trains; read by another."""

    def __init__(self) -> None:
        self._own: deque[float] = deque(maxlen=STEPS)
        self._whole: deque[float] = deque(maxlen=STEPS)
        self._ended: float | None = None
        self._is_measured = False
        self.steps = 0
        """The number of steps so far."""

    def backward_begins(self) -> None:
        """A backward is about to run; the first one since the last step counts."""
        if self._ended is not None and not self._is_measured:
            self._own.append(time.perf_counter() - self._ended)
            self._is_measured = True

    def stepped(self, steps: int) -> None:
        """A step is done; the argument is their number."""
        now, self.steps = time.perf_counter(), steps
        if self._ended is not None:
            self._whole.append(now - self._ended)
        self._ended, self._is_measured = now, False

    def medians(self) -> tuple[float | None, float | None, int]:
        """The medians of the time before a backward and of a whole step, in milliseconds, and the number of steps."""
        own, whole = list(self._own), list(self._whole)
        if not own or not whole:
            return None, None, 0
        return 1e3 * statistics.median(own), 1e3 * statistics.median(whole), min(len(own), len(whole))


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for at every step."""

    rank: int
    own_ms: float
    """Its time before its backward."""
    usual_ms: float
    """The median time of the others."""
    step_ms: float
    """The time of a whole step."""
    first_step: int
    """The step since which it is slow."""

    def summary(self) -> str:
        """One sentence with the figures."""
        more = self.own_ms - self.usual_ms
        return (
            f"rank {self.rank} is slower than the others since step {self.first_step:,}: it takes "
            f"{self.own_ms:,.1f} ms from a step to the next backward, the others {self.usual_ms:,.1f} ms; they wait "
            f"{more:,.1f} ms of the {self.step_ms:,.1f} ms of a step for it"
        )

    def evidence(self) -> dict[str, float]:
        """The figures."""
        return {
            "rank": self.rank,
            "own_ms": round(self.own_ms, 3),
            "usual_ms": round(self.usual_ms, 3),
            "step_ms": round(self.step_ms, 3),
            "times_slower": round(self.own_ms / self.usual_ms, 3) if self.usual_ms else 0.0,
            "first_step": self.first_step,
        }


class StragglerSearch:
    """Compares the ranks round by round."""

    def __init__(self) -> None:
        self._candidate: int | None = None
        self._since = self._rounds = 0
        self.known: Straggler | None = None
        """The reported straggler, while it is slow."""

    def compare(self, beats: Sequence[Beat]) -> Straggler | None:
        """One round over all ranks; returns a straggler that has not been reported yet."""
        slowest = _slowest(beats)
        rank = None if slowest is None else slowest[0].rank
        if rank != self._candidate:
            self._candidate, self._rounds = rank, 0
            self._since = 0 if slowest is None else slowest[0].step
        self._rounds += 1
        if slowest is None or self._rounds < ROUNDS:
            if self._rounds >= ROUNDS:
                self.known = None
            return None
        if self.known is not None and self.known.rank == rank:
            return None
        beat, usual = slowest
        assert beat.own_ms is not None
        self.known = Straggler(beat.rank, beat.own_ms, usual, beat.step_ms or 0.0, self._since)
        return self.known


def _slowest(beats: Sequence[Beat]) -> tuple[Beat, float] | None:
    """The slowest rank and the time of the others, if it is much slower."""
    measured = [each for each in beats if each.own_ms is not None and each.measured_steps >= FEWEST_STEPS]
    if len(measured) < 2 or len(measured) < len(beats):
        return None
    slowest = max(measured, key=lambda each: each.own_ms or 0.0)
    own = slowest.own_ms or 0.0
    usual = statistics.median(each.own_ms or 0.0 for each in measured if each is not slowest)
    needed = max(SMALLEST_MS, LOST_SHARE * (slowest.step_ms or 0.0))
    return (slowest, usual) if own >= SLOWER * usual and own - usual >= needed else None
