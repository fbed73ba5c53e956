"""The sampled steps of a run together: the calls, backward calls, model calls and updates of all of them."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from statistics import median, pvariance
from typing import TYPE_CHECKING

from surefoot.diagnose.by_hand import moves_by_hand
from surefoot.diagnose.curves import present
from surefoot.record.facts import SampledCalls
from surefoot.watch.operation_names import BINARY_LOSSES, CLASS_LOSSES, DISTANCE_LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from surefoot.record.facts import (
        BackwardCall,
        DifferenceCall,
        LossCall,
        LossSign,
        ModelCall,
        OptimizerUpdate,
        ParameterFacts,
        ParameterUpdate,
        SampledStep,
    )


class SampledData:
    """The records of the sampled steps, in order."""

    def __init__(self, steps: list[SampledStep], parameters: dict[int, ParameterFacts], has_optimizer: bool) -> None:
        self.steps = steps
        self._parameters = parameters
        self._has_optimizer = has_optimizer

    def between(self, first: float, last: float) -> SampledData:
        """The records of a part of the run, from one step to another."""
        steps = [step for step in self.steps if first <= step.step <= last]
        return SampledData(steps, self._parameters, self._has_optimizer)

    @cached_property
    def calls(self) -> SampledCalls:
        """The calls of all steps; each has its step."""
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
        """The factor of each loss function up to a `backward`: by its step and its position in it."""
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

    def share_of_mean(self, loss: LossCall) -> float | None:
        """The share of the mean over its targets that a loss is: 1, or a little less for a sum over a number of
        targets.

        A trainer may count targets that the model leaves out, such as the first token of each row. `None` if the loss
        is not a mean.
        """
        if loss.reduction == "mean":
            return 1.0
        sign = self.signs.get((loss.step, loss.index))
        if loss.reduction != "sum" or sign is None or sign.factor is None or loss.valid is None:
            return None
        share = sign.factor * loss.valid
        return share if 0.8 < share < 1.001 else None

    @cached_property
    def chance(self) -> float | None:
        """The loss of the best constant answer, if the run minimises one plain loss function."""
        roots = self.backward_calls
        names = {root.sign.function if root.sign is not None else None for root in roots}
        if names == {None}:
            return variance_of(squared_errors(self.steps))
        if len(names) != 1 or not self.adds_up_to_the_loss:
            return None
        losses = self.training_losses(*(name for name in names if name))
        shares = present(self.share_of_mean(call) for call in losses)
        if not losses or len(shares) < len(losses) or any(call.weighted or call.smoothing for call in losses):
            return None
        level = _constant_answer(losses)
        return level if level is None or losses[0].op in DISTANCE_LOSSES else level * median(shares)

    @cached_property
    def adds_up_to_the_loss(self) -> bool:
        """Whether the losses of a step are taken as they are, or divided by the number of its microbatches."""
        factors = {root.factor for root in self.backward_calls}
        counts = [len(step.backward_calls) for step in self.steps if step.backward_calls]
        only = factors.pop() if len(factors) == 1 else None
        return only is not None and (only == 1.0 or abs(only * median(counts) - 1.0) < 1e-6)

    @cached_property
    def begins_trained(self) -> bool:
        """Whether the first loss is far below that of the best constant answer, which no new model reaches.

        A new model makes a uniform guess, which is used if the best constant answer is not known. If one label is far
        more frequent than the others, nothing is concluded: an output that starts from these shares, and a first batch
        without the rare ones, look the same.
        """
        losses = [call for call in self.steps[0].calls.losses if call.trained_on] if self.steps else []
        if len(losses) != 1 or self.steps[0].step > 1 or losses[0].op != "cross_entropy" or losses[0].weighted:
            return False
        first, classes = losses[0], losses[0].distribution.classes if losses[0].distribution is not None else 0
        if first.value is None or classes < 2 or first.smoothing or self.share_of_mean(first) is None:
            return False
        if (first.valid or 0) < _FEWEST_LABELS:
            return False
        value = first.value if first.reduction == "mean" else first.value / max(1, first.valid or 0)
        even = math.log(classes)
        chance = self.chance
        is_uneven = chance is not None and chance < 0.5 * even
        return not is_uneven and value < 0.7 * (even if chance is None else min(even, chance))

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

    def update_ratios(self, before: int | None = None, optimizer: int | None = None) -> list[float]:
        """The median ratio of update to weight of the matrices at each step; without an optimizer, at the first steps.

        With the number of an `optimizer`, only its updates count.

        A loop that updates its parameters itself is sampled at its first steps only. Matrices that begin at 0, as those
        of adapters do, have no scale of their own at first, and count only if there are no others.
        """
        if not self._has_optimizer:
            return moves_by_hand(self._parameters.values())
        found = []
        for step in self.steps:
            if before is not None and step.step >= before:
                continue
            rows = [
                row
                for update in step.updates
                if optimizer in (None, update.optimizer)
                for row in update.rows
                if self.is_matrix(row.parameter) and row.ratio is not None and math.isfinite(row.ratio) and row.grad
            ]
            rows = [row for row in rows if self._parameters[row.parameter].first.norm != 0.0] or rows
            if rows:
                found.append(median(row.ratio for row in rows if row.ratio is not None))
        return found


def squared_errors(steps: list[SampledStep]) -> list[DifferenceCall]:
    """The differences whose mean square is minimised, where a script computes it by hand; one per step.

    The graph under the loss is a mean of a power of a difference. That the power is 2 is checked by value: the mean
    square of a difference lies between two bounds that the moments of both operands give.
    """
    found = []
    for step in steps:
        calls = [call for call in step.calls.differences if call.input.shape == call.target.shape]
        if not step.operations or not step.backward_calls:
            continue
        if len(step.backward_calls) != 1 or len(calls) != 1 or any(loss.trained_on for loss in step.calls.losses):
            return []
        root, call = step.backward_calls[0], calls[0]
        learned = {"linear", "conv1d", "conv2d", "matmul", "embedding"} & set(call.target_history)
        if root.operations[:3] != ["Mean", "Pow", "Sub"] or root.value is None or learned:
            return []
        if not math.isfinite(root.value) or not _is_mean_square(root.value, call):
            return []
        found.append(call)
    return found


def variance_of(differences: list[DifferenceCall]) -> float | None:
    """The variance of the targets, within and between the batches; `None` if too few are known."""
    means = present(call.target.mean for call in differences)
    spreads = present(call.target.std for call in differences)
    if len(means) < 3 or len(spreads) < len(means):
        return None
    between = pvariance(means)
    level = sum(spread * spread for spread in spreads) / len(spreads) + between
    return level if level > 0 else None


def _is_mean_square(value: float, call: DifferenceCall) -> bool:
    """Whether a value can be the mean square of a difference, by the means and deviations of its operands."""
    given, target = call.input, call.target
    if given.mean is None or given.std is None or target.mean is None or target.std is None:
        return False
    offset = (given.mean - target.mean) ** 2
    low, high = offset + (given.std - target.std) ** 2, offset + (given.std + target.std) ** 2
    return 0.9 * low - 1e-6 <= value <= 1.1 * high + 1e-6


_FEWEST_LABELS = 16
"""The loss of fewer labels may be far below that of a new model by chance."""
_MANY_KINDS = 100
_OF_EACH = 20
"""With more than `_MANY_KINDS` kinds of labels, this many of each must have occurred on average."""


def are_too_few(counts: Mapping[str, int]) -> bool:
    """Whether there are so many rare kinds of labels that their entropy is much lower than that of all labels.

    Words are an example: most of them are rare, and a few thousand do not show how rare.
    """
    return len(counts) > _MANY_KINDS and sum(counts.values()) < _OF_EACH * len(counts)


def level_of(calls: list[LossCall]) -> float | None:
    """The loss of the best constant answer of one plain loss function; `None` if it is weighted or moves by itself."""
    if any(call.reduction != "mean" or call.weighted or call.smoothing or call.target_from_model for call in calls):
        return None
    return _constant_answer(calls) if len({call.op for call in calls}) == 1 else None


def _constant_answer(losses: list[LossCall]) -> float | None:
    is_binary = losses[0].op in BINARY_LOSSES
    if losses[0].op in CLASS_LOSSES or (is_binary and any(call.constant_loss is None for call in losses)):
        return _entropy(losses)
    known = [call.target_variance if call.op == "mse_loss" else call.constant_loss for call in losses]
    levels = present(known)
    return median(levels) if len(levels) >= 3 else None


def _entropy(losses: list[LossCall]) -> float | None:
    """Entropy of all labels seen, in nats."""
    counts: dict[str, int] = {}
    for call in losses:
        if not call.labels:
            return None
        for label, count in call.labels.items():
            counts[label] = counts.get(label, 0) + count
    total = sum(counts.values())
    if len(losses) < 3 or total < 64 or are_too_few(counts):
        return None
    return -sum(c / total * math.log(c / total) for c in counts.values() if c)
