"""A recorded run for the rules: the facts, and derived values that many rules share."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from surefoot.diagnose.curves import LossCurve, present, present_finite
from surefoot.diagnose.initial_weights import began_new
from surefoot.diagnose.nonfinite import NonFiniteValues
from surefoot.diagnose.sampled import SampledData
from surefoot.record.facts import STEPS_ONLY, RunDescription

if TYPE_CHECKING:
    from collections.abc import Iterator

    from surefoot.record.facts import (
        Facts,
        ModelCall,
        OptimizerFacts,
        ParameterFacts,
        ProductCall,
        RunFacts,
        StepSeries,
    )

_E = TypeVar("_E", bound="Facts")
FEWEST_TRIALS = 3
"""The number of equally long trainings of separate models from which they are trials."""


class RecordedRun:
    """The facts of one run."""

    def __init__(self, facts: RunFacts, description: RunDescription | None = None) -> None:
        self.facts = facts
        self.description = description or RunDescription()
        self.steps = facts.steps
        self.parameters: dict[int, ParameterFacts] = {held.id: held for held in facts.parameters}
        """Every parameter, by number."""
        self.sampled = SampledData(facts.sampled_steps, self.parameters, bool(facts.optimizers))
        """The sampled steps."""

    def label(self, parameter: int) -> str:
        """The name of a parameter."""
        return self.parameters[parameter].label

    def events(self, kind: type[_E]) -> list[_E]:
        """The events of one kind."""
        return [event for event in self.facts.events if isinstance(event, kind)]

    def evaluations(self) -> Iterator[ModelCall]:
        """Model calls without gradients, between the steps and in them."""
        yield from self.facts.evaluations
        yield from (call for call in self.sampled.model_calls if not call.trained_on and not call.grad_mode)

    # Optimizers and their numbers

    @cached_property
    def optimizers(self) -> list[OptimizerFacts]:
        """Optimizers that stepped."""
        return [held for held in self.facts.optimizers if held.steps]

    @cached_property
    def main(self) -> OptimizerFacts | None:
        """The optimizer with the most steps, the last made among equals; that of the best training among trials."""
        if self.trials:
            return min(self.trials, key=self._final_loss)
        return max(self.optimizers, key=lambda held: (held.steps, held.number), default=None)

    @cached_property
    def trials(self) -> list[OptimizerFacts]:
        """The longest trainings, if they train one model each, one after another: a search, or a cross-validation.

        That some settings of a search do not learn is what it is for, and no fault of the script. Otherwise empty.
        """
        longest = max((held.steps for held in self.optimizers), default=0)
        found = [held for held in self.optimizers if held.steps == longest]
        numbers, spans = {held.number for held in found}, sorted(map(_span, found))
        follow = all(before[1] <= after[0] for before, after in pairwise(spans))
        is_shared = any(len(numbers.intersection(held.optimizers)) > 1 for held in self.facts.parameters)
        return found if len(found) >= FEWEST_TRIALS and follow and not is_shared else []

    def _final_loss(self, optimizer: OptimizerFacts) -> float:
        curve = self.curve_of(optimizer)
        return curve.end if curve.count and curve.first_bad is None else math.inf

    @property
    def series(self) -> StepSeries:
        """The numbers of the main optimizer's steps; for a loop without one, of its backward calls."""
        return self.main.series if self.main is not None else self.facts.backward_series

    @cached_property
    def lr(self) -> list[float]:
        """The learning rate of each step."""
        return present(self.series.lr)

    @cached_property
    def grad_norms(self) -> list[float]:
        """Finite gradient norms."""
        return present_finite(self.series.grad_norm)

    @property
    def adversarial(self) -> bool:
        """Whether several optimizers alternate, as in a GAN: then one loss alone says little. Phases do not count."""
        active = [held for held in self.optimizers if held.steps >= max(5, 0.02 * self.steps)]
        spans = [_span(held) for held in active if held.created_at_step <= 0.5 * self.steps]
        pairs = [(a, b) for i, a in enumerate(spans) for b in spans[:i]]
        return any(min(a[1], b[1]) - max(a[0], b[0]) > 0.1 * min(a[1] - a[0], b[1] - b[0]) for a, b in pairs)

    def update_ratios(self, before: int | None = None) -> list[float]:
        """The median ratio of update to weight at each sampled step of the main optimizer, or of those that alternate.

        Earlier phases of the run, such as a training that is followed by fine-tuning, have a curve of their own.
        """
        only = None if self.main is None or self.adversarial else self.main.number
        return self.sampled.update_ratios(before, only)

    # The loss

    def curve_of(self, optimizer: OptimizerFacts | None) -> LossCurve:
        """The loss of one optimizer's steps."""
        series = optimizer.series if optimizer is not None else self.facts.backward_series
        pairs = [(step, loss) for step, loss in zip(series.step, series.loss, strict=False) if loss is not None]
        sign = -1.0 if optimizer is not None and optimizer.first_group.maximize else 1.0
        chance = self._sampled_of(optimizer).chance
        began = LossCurve([sign * value for _, value in pairs], [step for step, _ in pairs], False, self.blind, chance)
        continues = optimizer is not None and _continues(optimizer, self.facts) and not began.begins_at_chance
        return replace(began, continued=_can_learn(self.facts) or continues or self.sampled.begins_trained)

    @cached_property
    def main_sampled(self) -> SampledData:
        """The sampled steps of the main optimizer: those of an earlier training are left out."""
        return self._sampled_of(self.main)

    def _sampled_of(self, optimizer: OptimizerFacts | None) -> SampledData:
        if optimizer is None or len(self.optimizers) < 2 or self.adversarial:
            return self.sampled
        return self.sampled.between(*_span(optimizer))

    @cached_property
    def curve(self) -> LossCurve:
        """The loss of the run."""
        return self.curve_of(self.main)

    @cached_property
    def blind(self) -> bool:
        """Whether the loss does not indicate progress: it is weighted by rewards, or its targets come from a model."""
        if self.facts.policy_entropies or self.facts.scope == STEPS_ONLY:  # the loss was not observed in detail
            return True
        losses = self.sampled.training_losses()
        if losses and sum(call.target_from_model for call in losses) > 0.5 * len(losses):
            return True
        calls = self.sampled.calls
        if calls.ratios and any(_has_both_signs(call) and "exp" in call.history for call in calls.products):
            return True  # advantages times importance ratios
        return any(weighs_by_reward(call) for call in calls.products)

    # What went wrong

    @cached_property
    def nonfinite(self) -> NonFiniteValues:
        """Losses and gradients that are not finite."""
        return NonFiniteValues(self.facts, self.curve)

    @property
    def failing(self) -> bool:
        """Whether the run fails by any measure: not finite, risen, or hardly changed."""
        return self.nonfinite.seen or self.curve.rose or not self.curve.learned


def _can_learn(facts: RunFacts) -> bool:
    """Whether the doctor found that a model can learn, or could not decide: in its few steps the loss need not fall."""
    return facts.preflight is not None and facts.preflight.overfits is not False


def weighs_by_reward(call: ProductCall) -> bool:
    """Whether a product is a log-probability times something of both signs: an advantage, never a target."""
    logs = {"log_prob", "log_softmax", "logsumexp"} & set(call.history)
    return not call.other_binary and ("log_prob" in call.history or (_has_both_signs(call) and bool(logs)))


def _has_both_signs(call: ProductCall) -> bool:
    return (call.other.min or 0.0) < 0 < (call.other.max or 0.0)


def _continues(optimizer: OptimizerFacts, facts: RunFacts) -> bool:
    """Whether most of what an optimizer trains was trained or loaded before it was made."""
    number = optimizer.number
    mine = [p for p in facts.parameters if number in p.optimizers and p.requires_grad]
    if not began_new(facts, mine):
        return True
    before = [p for p in mine if p.loaded or any(n < number for n in p.trained_by)]
    return optimizer.created_at_step > 0 and len(before) > 0.5 * len(mine) > 0


def _span(optimizer: OptimizerFacts) -> tuple[float, float]:
    """The first and the last step of the run at which an optimizer stepped."""
    when = present(optimizer.series.at)
    created = optimizer.created_at_step
    return (when[0], when[-1]) if when else (created, created + optimizer.steps)
