"""One guarded optimizer step: measure the gradients, decide, and prepare the optimizer to apply the step or skip it.

`GuardedOptimizer` combines the stages for a single step. It does not depend on the loop around it: no accumulation, no
schedule, no history. It does not call the optimizer either: `begin` runs before the optimizer's step and `end` after
it. The result is a `StepNumbers`, which on a GPU is read a few steps later.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.act.apply import (
    NOTHING_FOUND,
    LearningRateCut,
    OuterScaling,
    SettingsOfStep,
    StepCopy,
    can_fold,
    fold,
    has_torchs_step,
    is_guarded_twice,
    lacks_momentum,
    look_at_settings,
    outer_scaling,
    scale_gradients,
    set_for_step,
    withhold_gradients,
)
from surefoot.act.clip_pass import ClipPass
from surefoot.core.weak_reference import weak_reference
from surefoot.core.without_hooks import without_gradients
from surefoot.decide.raised_rate import StepRates
from surefoot.guard.decision_graph import GraphedDecider
from surefoot.guard.step_decision import (
    ArrivingNumbers,
    LayerNames,
    StepDecider,
    StepDecision,
    StepInput,
    StepNumbers,
    record_on_host,
)
from surefoot.observe.parameters import learning_rate
from surefoot.observe.tensors import (
    LayerMetrics,
    TensorMeter,
    TensorStatistics,
    all_plain,
    combine_shards,
    dense_views,
    total_norm,
)
from surefoot.observe.updates import UpdateMeter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surefoot.core.block_tables import BlockTables
    from surefoot.guard.model_sampling import ModelSampler
    from surefoot.guard.step_decision import StepPolicy
    from surefoot.observe.parameters import Layout
    from surefoot.observe.triton_pass import PlacedTensors
    from surefoot.observe.updates import ColumnsAfterStep
    from surefoot.types import NamedParameter, Scalar, Shaper


PARAM_NORM_EVERY = 100
"""The number of steps between two measurements of the parameters' norm, which is a reference and changes slowly."""


@dataclass(frozen=True)
class StepFacts:
    """What the loop provides about a step."""

    step: int
    loss: Tensor | None
    divisor: Scalar
    """The divisor that accumulation leaves for the gradients."""
    own: Mapping[str, Scalar]
    """The user's own signals."""
    lr_factor: float
    """The factor for the learning rates in this step."""
    clipped: Tensor | None = None
    """The factor that the caller has already multiplied the gradients by, to clip them."""
    was_broken: Tensor | None = None
    """Whether the gradients were not finite before the caller clipped them by value."""
    lr_limit: float = math.inf
    """The highest learning rate that this step may use."""


@dataclass(frozen=True)
class MeasuredGradients:
    """The gradients of a step: their parameters, their positions, and their statistics."""

    named: list[NamedParameter]
    tensors: list[Tensor]
    views: list[Tensor]
    statistics: TensorStatistics | PlacedTensors
    """Their statistics, or on a GPU what is needed to measure them together with the decision."""

    @property
    def tables(self) -> BlockTables | None:
        """The tables with which a kernel measures the gradients, if it reads them where they are."""
        return None if isinstance(self.statistics, TensorStatistics) else self.statistics.tables


class StepMeasurer:
    """Measures the gradients and, occasionally, the parameters of one optimizer."""

    def __init__(self, layout: Layout, *, across_ranks: bool, needs_largest: bool) -> None:
        self.layout, self._across_ranks, self._needs_largest = layout, across_ranks, needs_largest
        self._meter, self._parameter_meter = TensorMeter(), TensorMeter()
        self.param_norm: Tensor | None = None
        """The last measured norm of the parameters. It is saved with the run, because rules use it."""

    def gradients(self) -> MeasuredGradients | None:
        """The current gradients; `None` if no parameter has one."""
        named, gradients = self.layout.with_gradient()
        if not gradients:
            return None
        if all_plain(gradients):
            placed = self._meter.place(gradients)
            measured = self._meter.measure_views(gradients, self._needs_largest) if placed is None else placed
            return MeasuredGradients(named, gradients, gradients, measured)
        statistics = self._meter.measure(gradients)
        return MeasuredGradients(named, gradients, dense_views(gradients), self._combined(statistics, gradients))

    def measure_again(self, gradients: MeasuredGradients) -> TensorStatistics:
        """Measure the same gradients after they were changed, and perhaps replaced."""
        gradients.tensors[:] = [p.grad for _, p in gradients.named if p.grad is not None]
        gradients.views[:] = dense_views(gradients.tensors)  # a sparse one may have been coalesced
        return self._combined(self._meter.measure(gradients.tensors), gradients.tensors)

    def parameters(self, step: int, gradients: MeasuredGradients) -> Tensor:
        """The norm of the parameters, measured every `PARAM_NORM_EVERY` steps."""
        if self.param_norm is None or step % PARAM_NORM_EVERY == 0:
            own, meter = [parameter.detach() for _, parameter in gradients.named], self._parameter_meter
            measured = meter.measure_views(own, False) if all_plain(own) else self._combined(meter.measure(own), own)
            self.param_norm = total_norm(measured.norm)
        return self.param_norm

    def _combined(self, statistics: TensorStatistics, tensors: list[Tensor]) -> TensorStatistics:
        """Combine the statistics of all ranks, if tensors are sharded; an observer starts no collective."""
        return combine_shards(statistics, tensors) if self._across_ranks else statistics

    def parameters_broken(self) -> bool:
        """Whether any parameter has a non-finite entry. Waits for the device."""
        parameters = [parameter for _, parameter in self.layout.parameters]
        # They may include a frozen table of integers, as in a quantized layer.
        able = [each for each in parameters if each.is_floating_point() or each.is_complex()]
        return bool(self._parameter_meter.measure(able).nonfinite.sum() > 0)


@dataclass
class OpenStep:
    """A step between `GuardedOptimizer.begin` and `end`: it is decided, and the optimizer is prepared."""

    facts: StepFacts
    refused: bool = False
    """Whether the host has decided that the step must not be applied: the optimizer is not called, or has no effect."""
    refused_unchanged: bool = False
    """Whether it is refused and the gradients are still unchanged after backward."""
    measured: MeasuredGradients | None = None
    """`None` if no parameter has a gradient."""
    given: StepInput | None = None
    decision: StepDecision | None = None
    vector: Tensor | None = None
    settings: SettingsOfStep = NOTHING_FOUND
    columns: ColumnsAfterStep | None = None
    """Measures parameters and updates after the step, if they are watched."""
    watched: Mapping[str, Tensor] = field(default_factory=dict)
    """… and its results."""
    undo: ExitStack = field(default_factory=ExitStack)
    """Restores what was changed during the optimizer's step, except for what other code has changed since."""
    left_out: Any = False
    """Whether another guard on the same optimizer has skipped the step."""
    lr_factor: float = 1.0
    """The factor for the learning rates."""
    lr_cut: LearningRateCut | None = None
    copy: StepCopy | None = None
    """The state that a refused step restores at its end, if the optimizer cannot be kept from changing it."""


class StepPreparer:
    """Prepares an optimizer to apply a step as it was decided: clipped, unscaled, or not at all."""

    def __init__(self, optimizer: Any, policy: StepPolicy, *, on_device: bool, shapes: bool) -> None:
        """Set up the preparation of an optimizer's steps.

        Args:
            optimizer: the optimizer, to which no reference is kept.
            policy: has the loss scaler, if there is one.
            on_device: whether steps are decided on the device.
            shapes: whether shapers have changed the gradients when a step is decided.
        """
        self._policy, self._on_device, self._shapes = policy, on_device, shapes
        self.folds = can_fold(optimizer)
        """Whether the optimizer's kernel clips, unscales and skips."""
        self.clip_pass = ClipPass()

    def prepare(self, step: OpenStep, optimizer: Any) -> None:
        """Apply the decision to the next step, through the gradients or through arguments of the optimizer's kernel."""
        assert step.given is not None
        assert step.measured is not None
        assert step.decision is not None
        outer, views, decision = step.given.outer, step.measured.views, step.decision
        skip, divide, factor = decision.skip, decision.divide, decision.factor
        if not self._on_device and bool(skip):
            found = outer.found_inf is not None and bool(outer.found_inf > 0)
            # A decision of a `GradScaler` is left to the kernel, which already has it.
            step.refused = step.refused_unchanged = not found or lacks_momentum(optimizer)
            return
        if not self._on_device and decision.clip_factor == 1:
            factor = None  # multiplying by 1 would write all gradients without effect
        if self._shapes and outer.scale is not None:  # shapers leave unscaled gradients
            set_for_step(step.undo, optimizer, "grad_scale", torch.ones_like(outer.scale))
            outer = outer._replace(scale=None)
        if self.folds and divide is not None and divide.dtype is torch.float64:  # the kernel takes a float32
            scale_gradients(views, torch.where(torch.as_tensor(skip), 1.0, 1 / divide))
            divide = None
        if self.folds and not (self._on_device and lacks_momentum(optimizer)):
            # The kernel would divide by 1 / factor, which rounds differently from `clip_grad_norm_`.
            exactly = not self._on_device and divide is None and outer.scale is None
            if factor is not None and (factor.ndim or exactly):
                scale_gradients(views, factor)
                factor = None
            elif factor is not None and self._on_device:
                factor = self._left_to_fold(outer, optimizer, step.measured, decision)
            scales = self._policy.scaler is not None
            skipped = None if step.vector is None else step.vector[0]  # `skip` as the number that the kernel takes
            fold(step.undo, optimizer, outer, divide, factor, skipped, is_loss_scale=scales)
        elif bool(skip):  # the one scalar sync of an optimizer that is not fused
            step.refused = True
            step.refused_unchanged = not self._shapes  # shapers have changed the gradients by now
        else:
            if divide is not None:
                factor = 1 / divide if factor is None else factor / divide
            if factor is not None:
                scale_gradients(views, factor)

    def _left_to_fold(
        self, outer: OuterScaling, optimizer: Any, measured: MeasuredGradients, decision: StepDecision
    ) -> Tensor | None:
        """The clipper's factor if the optimizer's kernel must apply it, which writes all gradients."""
        assert decision.factor is not None
        scaled = decision.divide is not None or outer.scale is not None  # then all are written anyway
        tables = None if self._shapes else measured.tables  # shapers may have replaced the gradients
        if scaled or not self.clip_pass.serves(optimizer, measured.views, tables):
            return decision.factor
        self.clip_pass.divide(measured.views, (1 / decision.factor).to(torch.float32), decision.skip, tables)
        return None


class GuardedOptimizer:
    """Measures and decides the steps of one optimizer, and prepares the optimizer for each.

    `begin` runs before the optimizer's own step and `end` after it. With `acts=False` nothing is ever changed: the step
    is measured and decided, and the optimizer's step is not affected.
    """

    def __init__(
        self,
        optimizer: Any,
        layout: Layout,
        decider: StepDecider,
        shapers: tuple[Shaper, ...],
        watch: LayerMetrics | None,
        on_device: bool,
        *,
        acts: bool = True,
        sampler: ModelSampler | None = None,
    ) -> None:
        self._optimizer = weak_reference(optimizer)
        self.layout, self.decider = layout, decider
        self._shapers, self._watch, self._on_device, self._acts = shapers, watch or LayerMetrics(), on_device, acts
        self._graphed = GraphedDecider(decider)
        needs_largest = watch is not None or on_device  # on a device, all columns are copied to the host
        self.measurer = StepMeasurer(layout, across_ranks=acts, needs_largest=needs_largest)
        self._preparer = StepPreparer(optimizer, decider.policy, on_device=on_device, shapes=bool(shapers))
        self._updates = UpdateMeter(self._watch)
        self._constants: dict[float, Tensor] = {}
        self._sampler = sampler

    @property
    def optimizer(self) -> Any:
        """The optimizer, which is not kept alive."""
        return self._optimizer()

    def look_for_new_parameters(self) -> bool:
        """Add parameters that are new in the optimizer, as when layers are unfrozen one by one.

        Returns whether there were any.
        """
        if self.layout.refresh():
            self._preparer.folds = can_fold(self.optimizer)
            self.decider.policy.grow(len(self.layout.parameters))
            self.forget_recordings()
            return True
        if self._preparer.folds != all(group.get("fused") for group in self.optimizer.param_groups):
            self._preparer.folds = can_fold(self.optimizer)  # a loaded optimizer state contains its own flags
        return False

    def forget_recordings(self) -> None:
        """Drop recordings whose states have been replaced."""
        self._graphed.forget()

    def lr(self, factor: float) -> float | None:
        """The learning rate of the first group; `None` if reading it would need a sync."""
        groups = self.optimizer.param_groups
        lr = learning_rate(groups[0]) if groups else None
        return None if lr is None or isinstance(lr, Tensor) else lr * factor

    def rates(self) -> StepRates | None:
        """The learning rates of the next step; `None` if reading them would need a sync."""
        groups = self.optimizer.param_groups
        all_rates = [learning_rate(group) for group in groups]
        known = [float(rate) for rate in all_rates if rate is not None and not isinstance(rate, Tensor)]
        if not known or len(known) < len(groups):
            return None
        base = groups[0].get("initial_lr")
        shares = tuple(rate / known[0] for rate in known) if known[0] else ()
        return StepRates(known[0], float(base) if isinstance(base, int | float) else 0.0, shares)

    def lr_factor(self, facts: StepFacts) -> float:
        """The factor for the learning rates of a step."""
        rate = self.lr(1.0)
        if rate is None or rate * facts.lr_factor <= facts.lr_limit:
            return facts.lr_factor
        return facts.lr_limit / rate

    # ---- one step -------------------------------------------------------------------------------------------------

    @without_gradients
    def begin(self, facts: StepFacts) -> OpenStep:
        """Decide on the current gradients, and prepare the optimizer accordingly."""
        step = OpenStep(facts)
        step.measured = measured = self.measurer.gradients()
        if measured is None:
            return step
        self._decide(step, measured)
        assert step.decision is not None
        if self._watch.due(facts.step):
            derive = self._preparer.folds and self._acts and _steps_alone(self.optimizer)
            step.columns = self._updates.before(self.optimizer, measured.named, derive=derive)
        if self._sampler is not None:
            self._sampler.before_update(facts.step, measured.named, step.decision.divide)
        if self._acts:
            try:
                step.lr_factor = self.lr_factor(facts)
                if step.lr_factor != 1.0:
                    step.lr_cut = LearningRateCut(step.undo, self.optimizer, step.lr_factor)
                self._preparer.prepare(step, self.optimizer)
            except BaseException:
                step.undo.close()
                raise
        return step

    def withhold(self, step: OpenStep) -> None:
        """Make the optimizer's step do nothing, for a caller that cannot omit the call."""
        parameters, optimizer = self.layout.parameters, self.optimizer
        if not has_torchs_step(optimizer):  # it may still decay weights or count steps
            step.copy = StepCopy(parameters, optimizer)
        withhold_gradients(step.undo, optimizer, [parameter for _, parameter in parameters])

    @without_gradients
    def end(self, step: OpenStep) -> StepNumbers | None:
        """After the optimizer's step, restore what was changed for it. `None` if no parameter had a gradient."""
        with step.undo:
            if step.copy is not None:
                step.copy.restore()
            if step.columns is not None:
                step.watched, step.columns = step.columns(self.optimizer, step.refused), None
            if step.lr_cut is not None:
                step.lr_cut.keep_changes()
        if self._sampler is not None:
            self._sampler.after_update(step.facts.step)
            self._sampler.before_forward(step.facts.step + 1)
        return None if step.measured is None else self.numbers(step)

    def _decide(self, step: OpenStep, measured: MeasuredGradients) -> None:
        step.given = given = self._given(step, measured)
        if self._on_device and not self._shapers:
            step.decision, step.vector = self._graphed.decide(given)
        else:
            step.decision, step.vector = self._decide_in_pieces(given, measured)

    def _given(self, step: OpenStep, measured: MeasuredGradients) -> StepInput:
        facts = step.facts
        step.settings = look_at_settings(self.optimizer, self.layout.home, self._on_device)
        return StepInput(
            facts.step,
            measured.statistics,
            facts.loss,
            facts.divisor,
            facts.own,
            self.measurer.parameters(facts.step, measured),
            self._broken(step.settings),
            self.layout.positions if self.decider.policy.clipper is not None else None,
            outer_scaling(self.optimizer),
            facts.clipped,
            facts.was_broken,
        )

    def _broken(self, settings: SettingsOfStep) -> Scalar:
        """1 if a setting is not finite, else 0. Does not read from a device."""
        if not self._on_device:
            return float(bool(settings.broken))
        if settings.values is not None and not settings.broken:
            return 1 - (settings.values.abs() < torch.inf).all().to(torch.float32)
        value = float(bool(settings.broken))
        if value not in self._constants:
            self._constants[value] = torch.full((), value, dtype=torch.float32, device=self.layout.home)
        return self._constants[value]

    def _decide_in_pieces(self, given: StepInput, measured: MeasuredGradients) -> tuple[StepDecision, Tensor | None]:
        """Decide with the shapers in between; on the device, with the numbers as one vector."""

        def reshape(divide: Tensor | None) -> TensorStatistics:
            if divide is not None:
                scale_gradients(measured.views, 1 / divide)
            for shaper in self._shapers:
                shaper.shape(measured.named)
            return self.measurer.measure_again(measured)

        decision = self.decider.decide(given, reshape if self._shapers else None)
        return decision, decision.packed() if self._on_device else None

    def numbers(self, step: OpenStep) -> StepNumbers:
        """The numbers of a decided step, which may not be on the host yet."""
        assert step.measured is not None
        assert step.given is not None
        assert step.decision is not None
        facts, decision = step.facts, step.decision
        rules, notices, named = self.decider.rule_names, self.decider.notice_names, step.measured.named
        is_all = named is self.layout.parameters
        layout = LayerNames(self.layout.names, self.layout.ranks) if is_all else LayerNames.of(named)
        known = {"step": facts.step, "lr": self.lr(step.lr_factor)}
        if not self._acts:  # the step was skipped only if a scaler or another guard has skipped it
            decision = replace(decision, skip=self.decider.left_out_by(step.given.outer) | step.left_out)
            if step.vector is not None:
                _set_first(step.vector, decision.skip)
        if step.vector is not None:
            arriving = ArrivingNumbers(
                decision, step.vector, rules, notices, layout, step.watched, facts.own, step.settings, **known
            )
            clip_rate = self._preparer.clip_pass.rate
            return StepNumbers(arriving, clip_rate.take if self.decider.policy.clipper is not None else None)
        own = {name: float(value) for name, value in facts.own.items()}
        return StepNumbers(
            record_on_host(decision, rules, notices, layout, step.watched, step.settings, extra=own, **known)
        )

    # ---- optimizers that evaluate the loss themselves -------------------------------------------------------------

    @without_gradients
    def evaluated(self, facts: StepFacts, first: bool) -> OpenStep | None:
        """Decide and clip in place after a closure was evaluated, by an optimizer that may evaluate it again.

        Only the first evaluation of a step counts for the rules. Waits for the device. `None` if there is no gradient.
        """
        step = OpenStep(facts)
        step.measured = measured = self.measurer.gradients()
        if measured is None:
            return None
        states = self.decider.policy.states
        step.given = self._given(step, measured)
        step.decision, step.vector = self._decide_in_pieces(step.given, measured)
        step.refused = step.refused_unchanged = self._acts and bool(step.decision.skip)
        if self._acts and step.decision.factor is not None:
            scale_gradients(measured.views, step.decision.factor)
        if not first:
            self.decider.policy.states = states
        return step


def _set_first(vector: Tensor, value: Any) -> None:
    """Write the first entry without waiting: `vector[0] = False` would copy from memory that is not pinned."""
    first = vector[0]
    first.copy_(value) if isinstance(value, Tensor) else first.fill_(value)


def _steps_alone(optimizer: Any) -> bool:
    """Whether only the optimizer's own fused kernel changes the parameters between `begin` and `end`."""
    if lacks_momentum(optimizer) or is_guarded_twice(optimizer):
        return False
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    return all(map(is_own_hook, hooks))


def is_own_hook(hook: Any) -> bool:
    """Whether a step hook belongs to a guard."""
    given = (hook.func, *hook.args[:1]) if isinstance(hook, partial) else ()
    return any(getattr(each, "__module__", "").startswith("surefoot.guard.") for each in given)
