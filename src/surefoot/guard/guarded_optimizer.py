"""One optimizer behind its guard: measure the gradients, judge them, and apply them or leave them out.

`GuardedOptimizer` joins the stages for a single step and knows nothing of the loop around it: no accumulation, no
schedule, no history. What became of the step comes back as `StepNumbers`, which on a GPU are still on their way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.act.apply import can_fold, folded_step, lacks_momentum, scale_gradients, scaled_lr
from surefoot.act.closure import ClosureRefused, StepCopy
from surefoot.act.optimizer_settings import SettingsOfStep, look_at_settings
from surefoot.errors import UsageError
from surefoot.guard.cuda_graph import GraphedDecider
from surefoot.guard.step_decision import StepDecider, StepDecision, StepInput
from surefoot.guard.step_numbers import Arriving, StepNumbers, at_hand
from surefoot.observe.shards import combine_shards
from surefoot.observe.tensors import (
    LayerMetrics,
    TensorMeter,
    TensorStatistics,
    UpdateMeter,
    dense_views,
    is_plain,
    total_norm,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from surefoot.guard.model_sampling import ModelSampler
    from surefoot.observe.parameters import Layout
    from surefoot.types import NamedParameter, Scalar, Shaper


PARAM_NORM_EVERY = 100
"""How often the norm of the parameters is measured: it is a yardstick, and moves slowly."""


@dataclass(frozen=True)
class StepFacts:
    """What the loop knows of a step."""

    step: int
    loss: Tensor | None
    divisor: Scalar
    """What accumulation left to divide the gradients by."""
    own: Mapping[str, Scalar]
    """The user's own signals."""
    lr_factor: float
    """What the learning rates are multiplied by for this step."""


@dataclass(frozen=True)
class _Measured:
    """The gradients of a step: whose they are, where they lie, and their statistics."""

    named: list[NamedParameter]
    gradients: list[Tensor]
    views: list[Tensor]
    statistics: TensorStatistics


class GuardedOptimizer:
    """An optimizer whose steps are judged before they are applied."""

    def __init__(
        self,
        optimizer: Any,
        layout: Layout,
        judge: StepDecider,
        shapers: tuple[Shaper, ...],
        watch: LayerMetrics | None,
        on_device: bool,
    ) -> None:
        self.optimizer, self.layout, self.judge = optimizer, layout, judge
        self._shapers, self._watch, self._on_device = shapers, watch or LayerMetrics(), on_device
        self._graphed = GraphedDecider(judge)
        self._meter = TensorMeter()
        self._folds = can_fold(optimizer)
        self._constants: dict[float, Tensor] = {}
        self.param_norm: Tensor | None = None
        """The norm of the parameters when it was last measured: part of a saved run, since rules go by it."""
        self.refused_at_once = False
        """Whether the host knows already that the last step was refused."""
        self.portraits: ModelSampler | None = None
        """Who looks closely at some steps, when there is a run log to write it to."""

    def look_for_new_parameters(self) -> bool:
        """Take in parameters that were added to the optimizer, as when layers are unfrozen one by one.

        Returns whether there were any.
        """
        if self.layout.refresh():
            self._folds = can_fold(self.optimizer)
            self.judge.grow(len(self.layout.parameters))
            self.forget_recordings()
            return True
        if self._folds != all(group.get("fused") for group in self.optimizer.param_groups):
            self._folds = can_fold(self.optimizer)  # a loaded optimizer state brings its own flags
        return False

    def forget_recordings(self) -> None:
        """Drop what was recorded for states that have been replaced."""
        self._graphed.forget()

    def forget_norm(self) -> None:
        """The parameters are others now: measure their norm again."""
        self.param_norm = None

    def lr(self, factor: float) -> float | None:
        """The learning rate of the first group, unless reading it would need a sync."""
        lr = self.optimizer.param_groups[0].get("lr")
        if lr is None or (isinstance(lr, Tensor) and lr.device.type != "cpu"):
            return None
        return float(lr) * factor

    @torch.no_grad()
    def step(self, facts: StepFacts) -> StepNumbers | None:
        """Judge the gradients as they are now, and apply them or not; `None` if no parameter has one."""
        measured = self._measure()
        if measured is None:
            self.optimizer.step()
            self._close_look(facts.step)
            return None
        given, settings = self._given(facts, measured)
        vector: Tensor | None
        if self._on_device and not self._shapers:
            judged, vector = self._graphed.judge(given)
        else:
            judged, vector = self._judged_in_pieces(given, measured)
        updates = UpdateMeter(self._watch, measured.named) if self._watch.due(facts.step) else None
        if self.portraits is not None:
            self.portraits.before_update(facts.step, measured.named, judged.divide)
        with scaled_lr(self.optimizer, facts.lr_factor):
            self._apply(measured.views, judged)
        self._close_look(facts.step)
        return self._numbers(facts, judged, vector, measured, updates.columns() if updates else {}, settings)

    def _close_look(self, step: int) -> None:
        if self.portraits is not None:
            self.portraits.after_update(step)
            self.portraits.before_forward(step + 1)

    def _measure(self) -> _Measured | None:
        named, gradients = self.layout.with_gradient()
        if not gradients:
            return None
        statistics = self._meter.measure(gradients)
        if all(map(is_plain, gradients)):
            return _Measured(named, gradients, gradients, statistics)
        return _Measured(named, gradients, dense_views(gradients), combine_shards(statistics, gradients))

    def _given(self, facts: StepFacts, measured: _Measured) -> tuple[StepInput, SettingsOfStep]:
        settings = look_at_settings(self.optimizer, self.layout.home, self._on_device)
        if self.param_norm is None or facts.step % PARAM_NORM_EVERY == 0:
            own = measured.named
            statistics = self._meter.measure([parameter.detach() for _, parameter in own])
            self.param_norm = total_norm(combine_shards(statistics, [parameter for _, parameter in own]).norm)
        positions = self.layout.positions if self.judge.clipper is not None else None
        given = StepInput(
            facts.step,
            measured.statistics,
            facts.loss,
            facts.divisor,
            facts.own,
            self.param_norm,
            self._broken(settings),
            positions,
        )
        return given, settings

    def _broken(self, settings: SettingsOfStep) -> Scalar:
        """1 if a setting is not finite, else 0. Reads nothing off a device."""
        if not self._on_device:
            return float(bool(settings.broken))
        if settings.values is not None and not settings.broken:
            return 1 - (settings.values.abs() < torch.inf).all().to(torch.float32)
        value = float(bool(settings.broken))
        if value not in self._constants:
            self._constants[value] = torch.full((), value, dtype=torch.float32, device=self.layout.home)
        return self._constants[value]

    def _judged_in_pieces(self, given: StepInput, measured: _Measured) -> tuple[StepDecision, Tensor | None]:
        """Judge with the shapers in between; on the device, with the numbers as one vector."""

        def reshape(divide: Tensor | None) -> TensorStatistics:
            if divide is not None:
                scale_gradients(measured.views, 1 / divide)
            for shaper in self._shapers:
                shaper.shape(measured.named)
            measured.gradients[:] = [p.grad for _, p in measured.named if p.grad is not None]
            measured.views[:] = dense_views(measured.gradients)  # a shaper may have coalesced a sparse one
            return combine_shards(self._meter.measure(measured.gradients), measured.gradients)

        judged = self.judge.judge(given, reshape if self._shapers else None)
        return judged, judged.packed() if self._on_device else None

    def _apply(self, views: list[Tensor], judged: StepDecision) -> None:
        skip, divide, factor = judged.skip, judged.divide, judged.factor
        self.refused_at_once = not self._on_device and bool(skip)
        if self.refused_at_once:
            return
        if self._folds and not (self._on_device and lacks_momentum(self.optimizer)):
            if factor is not None and factor.ndim:
                scale_gradients(views, factor)
                factor = None
            grad_scale = divide if factor is None else (1 if divide is None else divide) / factor
            folded_step(self.optimizer, grad_scale, skip if self._on_device else None)
        elif bool(skip):  # the one scalar sync of an optimizer that is not fused
            self.refused_at_once = not self._shapers  # which have changed the gradients by now
        else:
            if divide is not None:
                factor = 1 / divide if factor is None else factor / divide
            if factor is not None:
                scale_gradients(views, factor)
            self.optimizer.step()

    def _numbers(
        self,
        facts: StepFacts,
        judged: StepDecision,
        vector: Tensor | None,
        measured: _Measured,
        watched: Mapping[str, Tensor],
        settings: SettingsOfStep,
    ) -> StepNumbers:
        rules, notices, named = self.judge.rule_names, self.judge.notice_names, measured.named
        known = {"step": facts.step, "lr": self.lr(facts.lr_factor)}
        if vector is not None:
            return StepNumbers(Arriving(judged, vector, rules, notices, named, watched, facts.own, settings, **known))
        own = {name: float(value) for name, value in facts.own.items()}
        return StepNumbers(at_hand(judged, rules, notices, named, watched, settings, extra=own, **known))

    # ---- optimizers that evaluate the loss themselves -------------------------------------------------------------

    def step_with_closure(self, evaluate: Callable[[], Tensor], facts_now: Callable[[], StepFacts]) -> StepNumbers:
        """Step with a closure; a refused step leaves parameters and optimizer state as they were.

        `evaluate` runs the user's closure; `facts_now` says what the loop knows after it. The first evaluation is
        judged. Later ones are the optimizer's own search: a bad trial point is its business as long as it ends on a
        good one.
        """
        before = StepCopy(self.layout.parameters, self.optimizer)
        evaluations: list[StepNumbers] = []

        def guarded() -> Tensor:
            loss = evaluate()
            evaluations.append(self._evaluated(facts_now(), first=not evaluations))
            if evaluations[0].record().skipped:
                raise ClosureRefused
            return loss

        try:
            with scaled_lr(self.optimizer, facts_now().lr_factor):
                self.optimizer.step(guarded)
        except ClosureRefused:
            before.restore()
        except BaseException:
            before.restore()
            raise
        if not evaluations:
            raise UsageError("the optimizer did not call the closure it was given.")
        record = evaluations[0].record()
        if len(evaluations) > 1 and not record.skipped and self.parameters_broken():
            before.restore()
            record = replace(record, skipped=True, reasons=("nonfinite",))
        return StepNumbers(record)

    @torch.no_grad()
    def _evaluated(self, facts: StepFacts, first: bool) -> StepNumbers:
        measured = self._measure()
        if measured is None:
            raise UsageError("the closure left no gradient: it must call `stabilizer.backward(loss)`.")
        states = self.judge.states
        given, settings = self._given(facts, measured)
        judged, vector = self._judged_in_pieces(given, measured)
        if judged.factor is not None:
            scale_gradients(measured.views, judged.factor)
        if not first:
            self.judge.states = states
        return self._numbers(facts, judged, vector, measured, {}, settings)

    def parameters_broken(self) -> bool:
        """Whether any parameter has a non-finite entry. Waits for the device."""
        parameters = [parameter for _, parameter in self.layout.parameters]
        # A frozen table of whole numbers may be among them, as in a quantized layer.
        able = [each for each in parameters if each.is_floating_point() or each.is_complex()]
        return bool(self._meter.measure(able).nonfinite.sum() > 0)
