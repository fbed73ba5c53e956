"""What the step rules share about records: how slowly they fade, and how refusals add up to a new level."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.detect.arrays import Array

FORGIVEN = 0.05
"""What one healthy step takes off the count of refusals, if a rule does not say otherwise."""


def fade(steps: Array, half_life_steps: float) -> Array:
    """What a record is multiplied by each step: it halves over the half-life, or while the run doubles in length."""
    return (steps / (steps + 1)).clip(0.5 ** (1 / half_life_steps))


def forgive(refused: Array, outlier: Array, forgiven: float = FORGIVEN) -> Array:
    """The count of refusals after an accepted step: 0 once an outlier was accepted as a new level, else a bit less."""
    return (refused - forgiven).clip(0.0) * ~outlier
