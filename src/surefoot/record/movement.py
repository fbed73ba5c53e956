"""Determines whether this rank moves, by checking its training thread about once a second from another thread.

A rank has moved if it has taken a step, is in other functions of the user than before, or was found in many places. It
works if it, or a child process, uses the CPU or transfers bytes. A rank that has neither moved nor worked for the limit
waits for others, if it is inside a collective or a backward; otherwise it stands. A loop that sleeps and checks for a
file stands too. A rank that works in the same instruction of the script is busy: a long computation, or on a GPU a wait
for the device. Everything else moves: evaluations, a first compilation, loading, saving, a slow step.

Time is counted in checks, and a check adds no more than a few times the usual pause: a machine that slept, or a process
that was stopped, has not waited in that time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.core.activity import Work, own_work
from surefoot.core.stacks import Position, position_of

if TYPE_CHECKING:
    from surefoot.record.heartbeat import Movement

IDLE_CPU = 0.05
"""A process that uses a smaller share of one CPU does no work. Threads that report to a service use 1% or 2%."""
MOST_QUEUED = 4.0
"""On a busy machine a process waits for the CPU. That counts as work, up to this multiple of the CPU time that it then
used: a loop that only wakes up to check also waits for the CPU."""
IDLE_BYTES_PER_SECOND = 32 * 1024
"""A process that reads and writes fewer bytes does no work."""
MOST_PLACES = 8
"""A loop that only waits is found in a few places; a thread found in more has moved."""
LONGEST_PAUSE = 3.0
"""A check counts for at most this multiple of the usual pause between checks."""


@dataclass(frozen=True)
class RankState:
    """The state of this rank."""

    movement: Movement
    seconds: float
    """The time since it last moved."""
    step: int
    position: Position | None


class MovementMeter:
    """Checks one thread."""

    def __init__(
        self,
        limit_seconds: float,
        pause_seconds: float,
        steps: Callable[[], int],
        thread: Callable[[], int],
        look: Callable[[int], Position | None] = position_of,
        work: Callable[[], Work] = own_work,
    ) -> None:
        self._limit, self._pause = limit_seconds, pause_seconds
        self._steps, self._thread, self._look, self._work = steps, thread, look, work
        self._key: tuple[int, tuple[int, ...]] | None = None
        self._exact: tuple[tuple[int, int], ...] = ()
        self._places: set[tuple[tuple[int, int], ...]] = set()
        self._unmoved = self._same_place = self._idle = 0.0
        self._clock = 0.0
        self._readings: deque[tuple[float, Work]] = deque()

    def look(self, elapsed: float) -> RankState:
        """Check once; the argument is the time in seconds since the previous check."""
        elapsed = min(elapsed, LONGEST_PAUSE * self._pause)
        self._clock += elapsed
        position, step = self._look(self._thread()), self._steps()
        key = (step, position.functions if position is not None else ())
        exact = position.exact if position is not None else ()
        self._places.add(exact)
        if key != self._key or len(self._places) > MOST_PLACES:
            self._unmoved = 0.0
            self._places.clear()
        else:
            self._unmoved += elapsed
        self._same_place = self._same_place + elapsed if exact == self._exact and self._unmoved else 0.0
        self._key, self._exact = key, exact
        if self._unmoved >= 2 * self._pause:
            self._measure(elapsed)
        else:
            self._readings.clear()
            self._idle = 0.0
        quiet = min(self._unmoved, self._idle)
        return RankState(self._movement(position, quiet), quiet or self._same_place, step, position)

    def _movement(self, position: Position | None, quiet: float) -> Movement:
        if position is None:
            return "moves"
        if position.in_debugger:
            return "debugged"
        if quiet >= self._limit:
            return "waits" if position.waits_in else "stands"
        return "busy" if min(self._same_place, self._unmoved) >= self._limit else "moves"

    def _measure(self, elapsed: float) -> None:
        """Follow the work over the last part of the limit."""
        self._readings.append((self._clock, self._work()))
        window = self._limit / 3
        while len(self._readings) > 2 and self._clock - self._readings[1][0] >= window:
            self._readings.popleft()
        began, first = self._readings[0]
        span = self._clock - began
        if span < min(window, 3 * self._pause):
            return
        last = self._readings[-1][1]
        cpu = max(0.0, last.cpu_seconds - first.cpu_seconds)
        cpu += min(last.queued_seconds - first.queued_seconds, MOST_QUEUED * cpu)
        moved = last.bytes_moved - first.bytes_moved
        is_idle = cpu < IDLE_CPU * span and moved < IDLE_BYTES_PER_SECOND * span
        self._idle = 0.0 if not is_idle else self._idle + elapsed if self._idle else span
