"""Saves that fail: training continues, and a warning is repeated at growing intervals.

The first failure of a kind is logged at once. After that, while nothing can be written, it is logged again at the 4th,
16th, 64th … failure in a row, and when ten minutes have passed, then twenty, then forty, each time with the age of the
newest good checkpoint: that is what a crash would cost.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("surefoot")

GROWTH = 4
"""How many times as many failures it takes for the next message."""
FIRST_PAUSE_SECONDS = 600.0


class FailedSaves:
    """What went wrong since the last save that worked."""

    def __init__(self) -> None:
        self.last_error: BaseException | None = None
        """What the last save failed of; `None` after one that worked."""
        self.failures = 0
        """How many saves in a row have failed."""
        self._logged: set[Any] = set()
        self._next, self._pause, self._again_at = GROWTH, FIRST_PAUSE_SECONDS, 0.0

    def failed(self, error: Exception, step: int, place: object, age: Callable[[], str]) -> str | None:
        """A save came to nothing. Returns what was logged, or `None` if it was logged a short while ago."""
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
        """Log a warning once, until a save has worked again."""
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning(message)

    def works_again(self, step: int) -> str | None:
        """A save worked. Returns what was logged if saves had failed before."""
        message = None
        if self.last_error is not None:
            message = f"checkpoints can be written again: step {step} is on the disk."
            log.info(message)
        self.last_error, self.failures = None, 0
        self._logged.clear()
        self._next, self._pause, self._again_at = GROWTH, FIRST_PAUSE_SECONDS, 0.0
        return message
