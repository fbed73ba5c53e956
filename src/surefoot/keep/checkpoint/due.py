"""When a checkpoint is due: every so many steps, every so many minutes, and again after a save that failed."""

from __future__ import annotations

import time
from collections import deque


class Due:
    """Tracks which steps are saved, and when the next checkpoint is due.

    A checkpoint is due at every multiple of `every_steps`, and when `every_minutes` have passed. A save that failed, or
    was not good, leaves it due, so that the next step is tried. When training returns to an earlier step, so does the
    count.

    Several processes must save the same steps, or no checkpoint is complete. So conditions of a single process (its
    clock, a busy writer, a full disk) are ignored: a save is due only at the multiples.

    In a single process, one save may wait while another is being written: the newer of the two counts as in progress.
    """

    def __init__(self, every_steps: int | None, every_minutes: float | None) -> None:
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self._saved = self._asked = 0
        self._under_way: int | None = None  # single process: being written
        self._begun: int | None = None  # several processes: saved, or attempted
        self._saved_at = time.monotonic()
        self._line = 0
        # Reports of the writing thread. Only the training thread changes the counts, so no lock is needed.
        self._ended: deque[tuple[int, int, bool, float]] = deque()

    def at(self, step: int, together: bool) -> bool:
        """Whether a save is due after this step; `together` means with other processes."""
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
        """A save of this step starts; returns the argument for `end`."""
        self._take_in()
        self._under_way = self._begun = step
        return self._line

    def end(self, step: int, line: int, good: bool) -> None:
        """The save has ended; may be called from another thread."""
        self._ended.append((step, line, good, time.monotonic()))

    def restart(self, step: int) -> None:
        """The state of this step was loaded: it counts as saved."""
        self._go_back(step, step)
        self._begun = step
        self._saved_at = time.monotonic()

    def _take_in(self) -> None:
        while self._ended:
            step, line, good, when = self._ended.popleft()
            if line != self._line:  # training has returned to an earlier step in the meantime
                continue
            if good:
                self._saved, self._saved_at = step, when
            if step == self._under_way:
                self._under_way = None

    def _go_back(self, saved: int, step: int) -> None:
        self._line += 1
        self._saved, self._asked = saved, step
        self._under_way = self._begun = None
