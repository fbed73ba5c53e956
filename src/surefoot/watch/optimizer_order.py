"""The order in which several optimizers step, and the schedulers that follow them.

Where one optimizer steps many times for each step of another, evenly spread samples would hardly ever include the
other. The number of its consecutive steps predicts when the other comes; varying numbers are not predicted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from surefoot.watch.context import SchedulerRecord
    from surefoot.watch.optimizer_record import OptimizerRecord


class OptimizerOrder:
    """Counts the consecutive steps of each optimizer."""

    def __init__(self) -> None:
        self._streak = (-1, 0)
        """The optimizer that stepped last, and the number of its consecutive steps."""
        self._streaks: dict[int, int] = {}

    def is_rare_next(self, watched: OptimizerRecord, optimizers: list[OptimizerRecord]) -> bool:
        """Whether another optimizer, which steps once for many steps of this one, is next and was rarely sampled."""
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


def follow(record: SchedulerRecord, record_of: Callable[[torch.optim.Optimizer], OptimizerRecord]) -> None:
    """Record the position of a scheduler and, the first time, its settings."""
    scheduler = record.ref()
    if scheduler is None:
        return
    record.steps = int(getattr(scheduler, "_step_count", 0) or 0)
    record.last_epoch = int(getattr(scheduler, "last_epoch", 0) or 0)
    if record.settings is None:
        optimizer = getattr(scheduler, "optimizer", None)
        record.optimizer = record_of(optimizer).number if optimizer is not None else None
        record.settings = {
            key: value
            for key, value in vars(scheduler).items()
            if isinstance(value, (int, float, bool)) and not key.startswith("_")
        }
