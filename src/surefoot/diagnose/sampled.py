"""The sampled steps of a run, taken together: the calls, backwards, model calls and updates of all of them."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

from surefoot.record.facts import SampledCalls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from surefoot.record.facts import (
        BackwardCall,
        LossCall,
        LossSign,
        ModelCall,
        OptimizerUpdate,
        ParameterFacts,
        ParameterUpdate,
        RunFacts,
        SampledStep,
    )


class SampledData:
    """What was seen of the sampled steps, in order."""

    def __init__(self, facts: RunFacts, parameters: dict[int, ParameterFacts]) -> None:
        self.steps: list[SampledStep] = facts.sampled_steps
        self._parameters = parameters

    @cached_property
    def calls(self) -> SampledCalls:
        """The calls of all steps; each has the step it was made in."""
        kinds = [field.name for field in dataclasses.fields(SampledCalls)]
        return SampledCalls(
            **{kind: [call for step in self.steps for call in getattr(step.calls, kind)] for kind in kinds}
        )

    @cached_property
    def backward_calls(self) -> list[BackwardCall]:
        """All calls of `backward`."""
        return [call for step in self.steps for call in step.backward_calls]

    @cached_property
    def signs(self) -> dict[tuple[int, int], LossSign]:
        """What each loss function was multiplied by on its way to a `backward`: by its step and its place in it."""
        calls = [(step.step, call.sign) for step in self.steps for call in step.backward_calls]
        return {(step, sign.index): sign for step, sign in calls if sign is not None}

    @cached_property
    def model_calls(self) -> list[ModelCall]:
        """All calls of models."""
        return [call for step in self.steps for call in step.model_calls]

    @cached_property
    def trained_model_calls(self) -> list[ModelCall]:
        """Calls of models whose output requires a gradient."""
        return [call for call in self.model_calls if call.trained_on]

    def training_losses(self, *names: str) -> list[LossCall]:
        """Calls of loss functions whose result was trained on."""
        return [call for call in self.calls.losses if call.trained_on and (not names or call.op in names)]

    def is_mean(self, loss: LossCall) -> bool:
        """Whether a loss is a mean over its targets, or a sum over them that is divided by their number."""
        if loss.reduction == "mean":
            return True
        sign = self.signs.get((loss.step, loss.index))
        if loss.reduction != "sum" or sign is None or sign.factor is None or loss.valid is None:
            return False
        return abs(sign.factor * loss.valid - 1) < 1e-3

    def begins_trained(self, chance: float | None) -> bool:
        """Whether the first loss is one that no new model has: far below that of the best constant answer.

        Where that is not known, it is far below that of an even guess, which is what a new model makes.
        """
        losses = [call for call in self.steps[0].calls.losses if call.trained_on] if self.steps else []
        if len(losses) != 1 or self.steps[0].step > 1 or losses[0].op != "cross_entropy" or losses[0].weighted:
            return False
        first, classes = losses[0], losses[0].distribution.classes if losses[0].distribution is not None else 0
        if first.value is None or classes < 2 or first.smoothing or not self.is_mean(first):
            return False
        value = first.value if first.reduction == "mean" else first.value / max(1, first.valid or 0)
        return value < 0.5 * min(math.log(classes), math.inf if chance is None else chance)

    def is_matrix(self, parameter: int) -> bool:
        """Whether a parameter has two dimensions or more."""
        return len(self._parameters[parameter].shape) >= 2

    def optimizer_updates(self, optimizer: int, first: int = 0, last: int | None = None) -> Iterator[OptimizerUpdate]:
        """The updates of one optimizer at a part of the sampled steps."""
        for step in self.steps[first:last]:
            yield from (update for update in step.updates if update.optimizer == optimizer)

    def weight_updates(self) -> Iterator[tuple[int, ParameterUpdate]]:
        """Step and row of every update of a matrix."""
        for step in self.steps:
            for update in step.updates:
                yield from ((step.step, row) for row in update.rows if self.is_matrix(row.parameter))

    def update_ratios(self, before: int | None = None) -> list[float]:
        """The median ratio of update to weight of the matrices at each step."""
        found = []
        for step in self.steps:
            if before is not None and step.step >= before:
                continue
            ratios = [
                row.ratio
                for update in step.updates
                for row in update.rows
                if self.is_matrix(row.parameter) and row.ratio is not None and math.isfinite(row.ratio) and row.grad
            ]
            if ratios:
                found.append(median(ratios))
        return found
