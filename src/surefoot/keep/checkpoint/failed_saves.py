"""Saves that fail: training continues, and a warning is repeated at growing intervals.

The first failure of a kind is logged immediately. While nothing can be written, it is logged again at the 4th, 16th,
64th … consecutive failure, and after ten minutes, then twenty, then forty, each time with the age of the newest good
checkpoint, which is the progress that a crash would lose.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("surefoot")

GROWTH = 4
"""The factor between the numbers of failures at two messages."""
FIRST_PAUSE_SECONDS = 600.0


class FailedSaves:
    """The failures since the last successful save."""

    def __init__(self) -> None:
        self.last_error: BaseException | None = None
        """The error of the last save; `None` after a successful one."""
        self.failures = 0
        """The number of consecutive failed saves."""
        self._logged: set[Any] = set()
        self._next, self._pause, self._again_at = GROWTH, FIRST_PAUSE_SECONDS, 0.0

    def failed(self, error: Exception, step: int, place: object, age: Callable[[], str]) -> str | None:
        """A save has failed. Returns the logged message, or `None` if one was logged recently."""
        self.last_error = error
        self.failures += 1
        kind = (type(error), getattr(error, "errno", None))
        if kind in self._logged and self.failures < self._next and time.monotonic() < self._again_at:
            return None
        if kind in self._logged:
            self._next, self._pause = self.failures * GROWTH, self._pause * 2
        self._logged.add(kind)
        self._again_at = time.monotonic() + self._pause
        many = f"; {self.failures:,} consecutive saves have failed" if self.failures > 1 else ""
        message = (
            f"the checkpoint of step {step} could not be written to {place}: {error or type(error).__name__}{many}. "
            f"Training continues, earlier checkpoints are unchanged, and the save will be tried again. {age()}"
        )
        log.warning(message, exc_info=None if isinstance(error, OSError) else error)
        return message

    def warn_once(self, kind: str, message: str) -> None:
        """Log a warning once, until a save has succeeded again."""
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning(message)

    def succeeded(self, step: int) -> str | None:
        """A save has succeeded. Returns the logged message if saves had failed before."""
        message = None
        if self.last_error is not None:
            message = f"checkpoints can be written again: step {step} is on the disk."
            log.info(message)
        self.last_error, self.failures = None, 0
        self._logged.clear()
        self._next, self._pause, self._again_at = GROWTH, FIRST_PAUSE_SECONDS, 0.0
        return message
