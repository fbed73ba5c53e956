"""Which steps get a close look: many at the start, where most goes wrong, then ever fewer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from surefoot.errors import require


@dataclass(frozen=True)
class Sampling:
    """Looks at steps 0, 1, 2, 3, 5, 8, 12, 18, …, each `growth` times the one before, and later every `every_steps`.

    Goes by the number of the step alone, so that a resumed run looks at the same steps. By default 22 looks in the
    first 5,000 steps and 221 in a million.

    >>> [step for step in range(100) if Sampling().due(step)]
    [0, 1, 2, 3, 5, 8, 12, 18, 27, 41, 62, 93]
    """

    growth: float = 1.5
    """How much farther out each look is than the one before."""
    every_steps: int = 4_999
    """The longest way between two looks. A prime, so that looks do not meet the round numbers people save at."""

    def __post_init__(self) -> None:
        require(self.growth > 1, f"`growth` must be more than 1, or looks never get fewer; got {self.growth}.")
        require(self.every_steps >= 1, f"`every_steps` must be at least 1; got {self.every_steps}.")

    def due(self, step: int) -> bool:
        """Whether this step is looked at."""
        return step in self._early if step < self.every_steps else step % self.every_steps == 0

    @cached_property
    def _early(self) -> frozenset[int]:
        steps, step = {0}, 1
        while step < self.every_steps:
            steps.add(step)
            step = max(step + 1, math.ceil(step * self.growth))
        return frozenset(steps)


RANK_STEPS = Sampling(growth=1.4, every_steps=997)
"""The steps at which ranks are compared, the same on every rank. A look costs about as much as an optimizer's step."""
