"""Selects the steps that are observed in detail: many at the start, where most problems occur, then fewer and fewer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from surefoot.errors import require


@dataclass(frozen=True)
class Sampling:
    """Selects steps 0, 1, 2, 3, 5, 8, 12, 18, …, each `growth` times the one before, and later every `every_steps`.

    Depends on the number of the step alone, so that a resumed run selects the same steps. By default, 22 of the first
    5,000 steps and 221 of a million are selected.

    >>> [step for step in range(100) if Sampling().due(step)]
    [0, 1, 2, 3, 5, 8, 12, 18, 27, 41, 62, 93]
    """

    growth: float = 1.5
    """The factor between two selected steps."""
    every_steps: int = 4_999
    """The maximum distance between two selected steps. A prime, to avoid the round numbers at which scripts save."""

    def __post_init__(self) -> None:
        require(self.growth > 1, f"`growth` must be more than 1, or every step is sampled; got {self.growth}.")
        require(self.every_steps >= 1, f"`every_steps` must be at least 1; got {self.every_steps}.")

    def due(self, step: int) -> bool:
        """Whether this step is selected."""
        return step in self._early if step < self.every_steps else step % self.every_steps == 0

    @cached_property
    def _early(self) -> frozenset[int]:
        steps, step = {0}, 1
        while step < self.every_steps:
            steps.add(step)
            step = max(step + 1, math.ceil(step * self.growth))
        return frozenset(steps)


RANK_STEPS = Sampling(growth=1.4, every_steps=997)
"""The steps at which ranks are compared, equal on every rank. Each costs about as much as a training step."""
