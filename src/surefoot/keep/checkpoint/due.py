"""When the next checkpoint is due.

At every multiple of `every_steps`, and when `every_minutes` have passed. A save that came to nothing, or was not good,
leaves it due, so that the next chance is taken. When training goes back to an earlier step, so does the count.

Several processes must save the same steps or none is whole. What is known to one alone (its clock, a writer that is
still busy, a disk that is full) must not count then: a save is due at the multiples and nowhere else.
"""

from __future__ import annotations

import time
from collections import deque


class Due:
    """Keeps count of what is saved and what is owed."""

    def __init__(self, every_steps: int | None, every_minutes: float | None) -> None:
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self._saved = self._asked = 0
        self._under_way: int | None = None  # alone: being written
        self._begun: int | None = None  # together: saved, or tried to
        self._saved_at = time.monotonic()
        self._line = 0
        # What the thread that writes reports; only the thread that trains changes the counts, so no lock is needed.
        self._ended: deque[tuple[int, int, bool, float]] = deque()

    def at(self, step: int, together: bool) -> bool:
        """Whether a save is due after this step; `together` with other processes, or alone."""
        self._take_in()
        if step < self._asked:
            self._go_back(min(self._saved, step), step)
        self._asked = step
        every = self._every_steps
        if together:
            return every is not None and step > 0 and step % every == 0 and step != self._begun
        saved = self._saved if self._under_way is None else self._under_way
        if every is not None and step // every > saved // every:
            return True
        if self._every_minutes is None or self._under_way is not None:
            return False
        return time.monotonic() - self._saved_at >= 60 * self._every_minutes

    def begin(self, step: int) -> int:
        """A save of this step starts; gives what `end` must be told."""
        self._take_in()
        self._under_way = self._begun = step
        return self._line

    def end(self, step: int, line: int, good: bool) -> None:
        """The save is over; may be called from another thread."""
        self._ended.append((step, line, good, time.monotonic()))

    def restart(self, step: int) -> None:
        """The state of this step was loaded: it is as good as saved."""
        self._go_back(step, step)
        self._begun = step
        self._saved_at = time.monotonic()

    def _take_in(self) -> None:
        while self._ended:
            step, line, good, when = self._ended.popleft()
            if line != self._line:  # training has gone back meanwhile: it does not count
                continue
            if good:
                self._saved, self._saved_at = step, when
            self._under_way = None

    def _go_back(self, saved: int, step: int) -> None:
        self._line += 1
        self._saved, self._asked = saved, step
        self._under_way = self._begun = None
