"""Whose turn it is: optimizers that alternate, and the schedules that follow them.

Where one optimizer steps many times for each step of another, looks spread evenly would hardly ever meet the other. The
length of a streak foretells when it comes. Streaks of changing length are not foretold.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from surefoot.watch.optimizer_record import OptimizerRecord


class OptimizerOrder:
    """How often each optimizer stepped in a row."""

    def __init__(self) -> None:
        self._streak = (-1, 0)
        """The optimizer that stepped last, and how often in a row."""
        self._streaks: dict[int, int] = {}

    def is_rare_next(self, watched: OptimizerRecord, optimizers: list[OptimizerRecord]) -> bool:
        """Whether another optimizer, which steps once for many of this one's, comes next and was seldom looked at."""
        if len(optimizers) < 2:
            return False
        number, count = self._streak
        if number != watched.number:
            self._streaks[number] = count
            self._streak = (watched.number, 1)
            return False
        self._streak = (number, count + 1)
        if count + 1 != self._streaks.get(number):
            return False
        others = [held for held in optimizers if held is not watched and held.series.count]
        return any(held.sampled_steps < 4 + math.log2(held.series.count) for held in others)


def follow(facts: dict[str, Any], watched: Callable[[torch.optim.Optimizer], OptimizerRecord]) -> None:
    """Read off a schedule how far it is and, the first time, what it was given."""
    scheduler = facts["ref"]()
    if scheduler is None:
        return
    facts["steps"] = int(getattr(scheduler, "_step_count", 0) or 0)
    facts["last_epoch"] = int(getattr(scheduler, "last_epoch", 0) or 0)
    if "settings" not in facts:
        optimizer = getattr(scheduler, "optimizer", None)
        facts["optimizer"] = watched(optimizer).number if optimizer is not None else None
        facts["settings"] = {
            key: value
            for key, value in vars(scheduler).items()
            if isinstance(value, (int, float, bool)) and not key.startswith("_")
        }
