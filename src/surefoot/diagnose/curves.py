"""The course of a loss: risen, flat, learned or diverged; and whether its level indicates progress at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

FEWEST_LOSSES = 5
"""With fewer finite losses no rule can judge a curve."""
_AT_CHANCE = 0.98
"""From this share of the best constant answer's loss on, no more than that answer is known."""
_MANY_STEPS, _NEARLY_ALL = 0.25, 0.7
"""The share of a run that it took to reach the best constant answer, and of what is left, from which on it matters."""


def present(values: Iterable[float | None]) -> list[float]:
    """The numbers of a column that are present, finite or not."""
    return [value for value in values if value is not None]


def present_finite(values: Iterable[float | None]) -> list[float]:
    """The finite numbers of a column."""
    return [value for value in values if value is not None and math.isfinite(value)]


@dataclass(frozen=True)
class LossValues:
    """The losses of a run and their levels: first, last, lowest, noise."""

    values: list[float]
    """All losses, finite or not, in order."""
    steps: list[int]
    continued: bool = False
    """Whether the parameters had been trained or loaded before, for this task: the loss need not fall any more."""
    blind: bool = False
    """Whether its level does not indicate progress, as in policy gradients and bootstrapped targets."""
    chance: float | None = None
    """The loss of the best constant answer, if it is known."""

    @cached_property
    def finite(self) -> list[float]:
        """The finite losses."""
        return [value for value in self.values if math.isfinite(value)]

    @cached_property
    def first_bad(self) -> int | None:
        """The first step whose loss is not finite."""
        return next((s for s, v in zip(self.steps, self.values, strict=True) if not math.isfinite(v)), None)

    @property
    def count(self) -> int:
        """Number of finite losses."""
        return len(self.finite)

    @cached_property
    def window(self) -> int:
        """The number of losses at each end of the curve that are averaged."""
        return max(1, min(50, self.count // 10))

    @cached_property
    def start(self) -> float:
        """The initial level: the first loss, or the median of the first few in a long run."""
        if not self.finite:
            return math.nan
        # A divergence in the first few steps must not count as the beginning.
        return min(self.finite[0], median(self.finite[: max(1, min(5, self.count // 20))]))

    @cached_property
    def end(self) -> float:
        """The final level."""
        return median(self.finite[-self.window :]) if self.finite else math.nan

    @cached_property
    def best(self) -> float:
        """The lowest level that lasted."""
        if not self.finite:
            return math.nan
        size = max(1, self.window // 2)
        return min(median(self.finite[i : i + size]) for i in range(0, max(1, self.count - size + 1), size))

    @cached_property
    def noise(self) -> float:
        """Typical step-to-step movement in the second half."""
        half = self.finite[self.count // 2 :]
        moves = [abs(b - a) for a, b in pairwise(half)]
        return median(moves) if moves else 0.0

    @property
    def drop(self) -> float:
        """The share of the first loss that is gone at the end; negative if it rose. Only for losses above zero."""
        return (self.start - self.end) / abs(self.start) if self.finite and self.start else 0.0

    @property
    def begins_at_chance(self) -> bool:
        """Whether the first losses are no better than the best constant answer: the task is new to the parameters."""
        return self.chance is not None and self.chance > 0 and self.start >= _AT_CHANCE * self.chance

    @property
    def left(self) -> float:
        """The loss at the end as a share of what there was to learn: the first loss, or chance if that is lower.

        No setting can have cost more than this. Only for losses above zero.
        """
        level = min(self.start, math.inf if self.chance is None else self.chance)
        return self.end / level if self.finite and level > 0 else 1.0

    @cached_property
    def start_lost(self) -> float:
        """The share of the run in which a loss from twice the best constant answer's on fell to that level.

        A model with a usual scale begins there: that many steps were lost. 0 if it began lower, or nothing is known.
        """
        if self.chance is None or self.chance <= 0 or not self.start > 2 * self.chance:
            return 0.0
        size = max(1, min(10, self.count // 20))
        reached = (i for i in range(self.count) if median(self.finite[i : i + size]) <= self.chance)
        return next(reached, self.count) / self.count

    @property
    def starts_far_up(self) -> bool:
        """Whether that took a quarter of the run, or nearly all is left at the end: the start has cost something.

        Where less is left, that may be noise of the data, which no model learns.
        """
        return self.start_lost >= _MANY_STEPS or (self.start_lost > 0 and self.left >= _NEARLY_ALL)

    @cached_property
    def rebound(self) -> float:
        """How far its level rose again after a fall, as a share of the whole fall; by medians of twentieths of it."""
        size = max(5, self.count // 20)
        levels = [median(self.finite[i : i + size]) for i in range(0, self.count - size + 1, size)]
        lowest = [min(levels[: i + 1]) for i in range(len(levels))]
        fall = self.start - lowest[-1] if levels else 0.0
        return max(level - low for level, low in zip(levels, lowest, strict=True)) / fall if fall > 0 else 0.0

    @property
    def best_drop(self) -> float:
        """The share of the first loss that was gone at the best point."""
        return (self.start - self.best) / abs(self.start) if self.finite and self.start else 0.0

    @property
    def peak(self) -> float:
        """The highest finite loss."""
        return max(self.finite) if self.finite else math.nan


class LossCurve(LossValues):
    """The course of a loss."""

    @cached_property
    def before_bad(self) -> LossCurve:
        """The part before the first step with a non-finite loss."""
        if self.first_bad is None:
            return self
        until = self.steps.index(self.first_bad)
        return LossCurve(self.values[:until], self.steps[:until], self.continued, self.blind, self.chance)

    @cached_property
    def around_zero(self) -> bool:
        """Whether it stays around zero within its own noise: then its level does not indicate progress."""
        return self.count > 20 and max(abs(self.start), abs(self.end)) < 2 * self.noise and min(self.finite) < 0

    @property
    def rose(self) -> bool:
        """Whether it ended, or was for long, far above its beginning."""
        if self.count < FEWEST_LOSSES or self.blind or self.around_zero:
            return False
        above = self.end > self.start + max(0.5 * abs(self.start), 3 * self.noise)
        # Never lower than at the end: either the first loss was an outlier, or the loss rose and never recovered.
        thrown = self.blew_up and self.end > 5 * self.start > 0
        return above and (self.end > self.best * 1.2 or thrown)

    @property
    def blew_up(self) -> bool:
        """Whether it was ever far above its beginning, even if it recovered."""
        return self.count >= FEWEST_LOSSES and not self.blind and self.peak > 20 * abs(self.start) + 20 * self.noise

    @property
    def flat(self) -> bool:
        """Whether it ended about where it began, and never was much lower."""
        if self.count < 8 or self.blind or self.continued:
            return False
        move = abs(self.start - self.end)
        return move < max(0.05 * abs(self.start), 1.0 * self.noise) and self.best_drop < 0.1

    @property
    def learned(self) -> bool:
        """Whether it clearly fell, and stayed low."""
        if self.first_bad is not None:
            return False
        if self.blind or self.around_zero or (self.continued and not self.rose):
            return True
        if self.count < FEWEST_LOSSES or (self.chance is not None and self.end > 0.97 * self.chance + 1e-6):
            return False
        return self.start - self.end > max(0.15 * abs(self.start), 2 * self.noise)

    @property
    def fell_through_noise(self) -> bool:
        """Whether the end is below the beginning by more than the error of the median of noisy losses."""
        if self.rose or (self.chance is not None and self.end > 0.97 * self.chance):
            return False
        return self.start - self.end > max(0.15 * abs(self.start), 3 * self.noise / math.sqrt(self.window))
