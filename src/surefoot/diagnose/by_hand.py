"""Loops that update their parameters themselves, without an optimizer: what was trained, and the size of each step.

Such a loop is sampled at its first steps only. The factor of its gradients is not known.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import ParameterFacts


def updates_by_hand(run: RecordedRun) -> bool:
    """Whether the script has no optimizer and changes its parameters itself."""
    return not run.facts.optimizers and any(map(_moves, run.parameters.values()))


def trained_models(run: RecordedRun) -> set[str]:
    """The names of models with parameters that were updated, by an optimizer or by hand."""
    by_hand = updates_by_hand(run)
    return {p.model for p in run.parameters.values() if p.changed or (by_hand and _moves(p))}


def moves_by_hand(parameters: Iterable[ParameterFacts]) -> list[float]:
    """The change of the matrices in each step, as a share of their norm: the medians, without steps of 0."""
    moves = [p.moves for p in parameters if _moves(p) and len(p.shape) >= 2]
    steps = [[held[i] for held in moves if i < len(held)] for i in range(max(map(len, moves), default=0))]
    return [typical for each in steps if (typical := median(each)) > 0]


def _moves(parameter: ParameterFacts) -> bool:
    """Whether a loss depends on a parameter without an optimizer that still changes."""
    return bool(parameter.moved_alone and parameter.in_graph)
