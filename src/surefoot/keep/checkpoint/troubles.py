"""Trouble with the disk, told once: training goes on, and a log full of the same line helps nobody."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("surefoot")


class Troubles:
    """What went wrong since the last save that worked."""

    def __init__(self) -> None:
        self.last_error: BaseException | None = None
        """What the last save failed of; `None` after one that worked."""
        self._told: set[Any] = set()

    def failed(self, error: Exception, step: int, place: object) -> None:
        """A save came to nothing."""
        self.last_error = error
        self.tell(
            (type(error), getattr(error, "errno", None)),
            f"the checkpoint of step {step} could not be written to {place}: {error or type(error).__name__}. "
            "Training goes on, earlier checkpoints are untouched, and it will be tried again.",
            None if isinstance(error, OSError) else error,
        )

    def tell(self, kind: Any, message: str, error: BaseException | None = None) -> None:
        """Say something once, until a save has worked again."""
        if kind not in self._told:
            self._told.add(kind)
            log.warning(message, exc_info=error)

    def works_again(self, step: int) -> None:
        """A save worked."""
        if self.last_error is not None:
            log.info("checkpoints can be written again: step %d is on the disk.", step)
        self.last_error = None
        self._told.clear()
