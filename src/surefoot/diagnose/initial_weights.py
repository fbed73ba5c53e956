"""Determines whether weights are new or were trained before, from their values before the first step.

Normalization layers begin with ones and zeros, and lose that with the first update. The default weights of linear and
convolutional layers are drawn uniformly between two bounds: the largest is at most 1.74 times their spread, and trained
weights have longer tails than that. Models of Transformers draw them from a normal distribution, and set every bias to
0, which the first update changes. Weights for which nothing can be decided count as neither new nor trained.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from surefoot.record.facts import TRAINING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surefoot.record.facts import ParameterFacts, RunFacts

_EVEN_TAIL = 1.8
"""The largest of evenly drawn values is at most sqrt(3) times their spread; the spread of few values varies."""
_FEWEST = 64
"""A matrix with fewer entries does not show how they were drawn."""


def size_of(parameters: Sequence[ParameterFacts]) -> int:
    """The number of weights."""
    return sum(math.prod(parameter.shape) for parameter in parameters)


def look_trained(parameters: Sequence[ParameterFacts]) -> bool:
    """Whether weights differ from the values that layers begin with: then they were trained before, and read from a
    file.

    Without normalization layers, the tails of the weights show it: the largest of n values drawn at random stays near
    sqrt(2 ln n) times their spread.
    """
    constant = _constant_norms(parameters)
    if constant:
        return sum(constant) < 0.5 * len(constant)
    tails = [
        p.first.largest / p.first.std - math.sqrt(2 * math.log(size_of([p])))
        for p in parameters
        if p.first.std and p.first.largest is not None and size_of([p]) > 1
    ]
    return bool(tails) and median(tails) > 2


def look_new(parameters: Sequence[ParameterFacts]) -> bool:
    """Whether weights have the values that layers begin with. False if that cannot be determined."""
    constant = _constant_norms(parameters)
    if constant:
        return sum(constant) >= 0.5 * len(constant)
    tails = [
        p.first.largest / p.first.std
        for p in parameters
        if p.first.std and p.first.largest is not None and size_of([p]) >= _FEWEST
    ]
    biases = [p for p in parameters if len(p.shape) == 1 and p.first.norm is not None]
    return bool(tails) and (median(tails) < _EVEN_TAIL or (bool(biases) and not any(p.first.norm for p in biases)))


def began_new(facts: RunFacts, parameters: Sequence[ParameterFacts]) -> bool:
    """Whether weights without an observed load were new when the run began.

    If nothing before the training was observed, their values must show it.
    """
    return facts.scope != TRAINING or look_new(parameters)


def _constant_norms(parameters: Sequence[ParameterFacts]) -> list[bool]:
    """For every weight of a normalization layer, whether all its entries had the same size at first."""
    norms = [p for p in parameters if "norm" in p.module_type.lower() and p.first.norm is not None]
    return [_is_constant(p) for p in norms]


def _is_constant(p: ParameterFacts) -> bool:
    norm, largest = p.first.norm or 0.0, p.first.largest or 0.0
    return math.isclose(norm, largest * math.sqrt(size_of([p])), rel_tol=1e-4)
