"""Observes the construction of optimizers, and each of their steps, from the gradients to the row of numbers.

One row per step holds the loss, the gradient norm, the learning rate and what clipping and a gradient scaler did. Steps
that a scaler or the guard skips are observed too.
"""

from __future__ import annotations

import math
import sys
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from surefoot.core.device import postpone_triton
from surefoot.core.without_hooks import WithoutHooks
from surefoot.guard.attach import account_of
from surefoot.observe.parameters import learning_rate
from surefoot.observe.readable import readable
from surefoot.watch.guard import OptimizerGuard
from surefoot.watch.log_rows import WatchLog
from surefoot.watch.nonfinite_gradients import NonFiniteGradients
from surefoot.watch.optimizer_order import follow
from surefoot.watch.optimizer_record import OptimizerRecord, least
from surefoot.watch.replica_looks import PROBE as RANKS
from surefoot.watch.tensor_summary import real
from surefoot.watch.triton_loading import IMPORT_AT_STEP, TritonLoader
from surefoot.watch.user_frames import name_of, site, trainer_of, user_frame

if TYPE_CHECKING:
    from surefoot.guard.attach import Attachment
    from surefoot.types import StepRecord
    from surefoot.watch.backward_observer import BackwardObserver
    from surefoot.watch.collected_facts import FactsSaver
    from surefoot.watch.context import WatchContext
    from surefoot.watch.incidents import IncidentWriter
    from surefoot.watch.replica_looks import ReplicaLooks
    from surefoot.watch.step_rows import SeriesRow
    from surefoot.watch.step_sampler import StepSampler


FOUND_BY_SCALER = "found_inf"
"""The attribute through which a `GradScaler` tells a fused optimizer to skip the step: not 0 if it must."""
RETAINED_EVERY = 16
"""The number of steps between two counts of the graphs that the script still holds."""


class StepObserver:
    """Is called when an optimizer is made, and before and after each of its steps."""

    def __init__(
        self,
        context: WatchContext,
        sampler: StepSampler,
        incidents: IncidentWriter | None,
        backward: BackwardObserver,
        saver: FactsSaver,
        ranks: ReplicaLooks,
    ) -> None:
        self._context, self._sampler, self._incidents = context, sampler, incidents
        self._backward, self._saver, self._ranks = backward, saver, ranks
        self._state, self._safely, self._registry = context.state, context.probes.safely, context.registry
        self._backwards_at_zero = -1
        self._zero_site = ""
        self._nonfinite = NonFiniteGradients(context)
        self._unmeasured = UnmeasuredSteps(context, self._nonfinite)
        self.guard = OptimizerGuard(context, self._found_nonfinite, self._step_arrived, self._await_numbers)

    # ---- optimizers

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        """A new optimizer was made: record its settings and its parameters."""
        self._state.thread = get_ident()
        records = self._context.optimizers.all
        number = len(records)
        write = self._context.events.write

        def take(row: SeriesRow) -> None:
            if "first_gradient" in row:
                self._unmeasured.take(row)
            write(WatchLog.step, row, number)

        record = OptimizerRecord(number, optimizer, site(3), self._state.steps, take)
        records.append(record)
        frame = user_frame(3)
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                parameter = self._registry.add(tensor)
                parameter.optimizers.add(record.number)
                if not parameter.name and not isinstance(tensor, nn.Parameter) and frame is not None:
                    parameter.name = name_of(tensor, frame)
        if self._incidents is not None:
            self._safely("incidents", self._incidents.optimizer_made)
        if not number and not self.guard.acts:
            triton = TritonLoader(may_import=lambda: self._state.steps >= IMPORT_AT_STEP)
            postpone_triton(triton.is_loaded, self._context.probes.is_observing)
        self._sampler.sample_soon()
        return record

    def record_of(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        """The record of an optimizer, created if its construction was not observed."""
        return self._context.optimizers.find(optimizer) or self.optimizer_made(optimizer)

    def gradients_zeroed(self) -> None:
        """`zero_grad` was called on an optimizer or a model."""
        self._backwards_at_zero = self._state.backwards
        if self._state.sampled is not None:
            self._zero_site = self._safely("zero_grad", site, 4) or ""

    # A step

    def before(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """An optimizer is about to step."""
        state = self._state
        record = self.record_of(optimizer)
        if record.backwards_at_start < self._backwards_at_zero < state.backwards and not has_closure:
            record.zeroed_between += 1
            record.zero_site = self._zero_site
        record.backwards_at_start = state.backwards
        if not record.series.count:
            state.trainer = state.trainer or trainer_of(sys._getframe())
        state.backwards_at_closure = state.backwards if has_closure else None
        if state.sampled is not None:
            self._sampler.before_step(record, optimizer, has_closure)
        if self._backwards_at_zero == state.backwards and self._context.losses.values and not has_closure:
            record.zeroed_before_step += 1
            record.zero_site = self._zero_site
        record.row = {}
        if self._ranks.is_on and not has_closure:
            self._safely(RANKS, self._ranks.before_step, record, optimizer)
        self._safely(self.guard.probe, self._give_to_guard, record, optimizer, has_closure)

    def _give_to_guard(self, record: OptimizerRecord, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """Attach the guard if necessary, and pass it the loss of the current step if it needs one."""
        record.may_be_healthy = False
        attachment = self.guard.attachment(record, optimizer)
        if attachment is None or not attachment.attached:
            return
        if self.guard.trainers.has_any and self.guard.trainers.of(optimizer) is not None:
            self._await_step(record, optimizer, attachment)
            return
        if not self.guard.measured.measures(record.number):
            if not has_closure:
                self._unmeasured.begin(record.row, optimizer)
            return
        if not has_closure and self.guard.measured.may_be_healthy(record, self._context.losses):
            record.may_be_healthy = True
            return
        self._await_numbers(record, optimizer, has_closure)

    def _await_numbers(
        self, record: OptimizerRecord, optimizer: torch.optim.Optimizer, has_closure: bool = False
    ) -> None:
        """The guard measures the current step: pass it the loss, and complete the row with its numbers."""
        attachment = self.guard.attachment(record, optimizer)
        if attachment is None:
            return
        loss = None if has_closure else self._context.losses.loss_so_far()
        if loss is not None and (account := account_of(attachment)) is not None:
            account.observe(loss, {})  # whatever the script calls backward on
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor) and found_inf.numel() == 1:
            attachment.observe(**{FOUND_BY_SCALER: found_inf})
        self._await_step(record, optimizer, attachment)

    def _await_step(self, record: OptimizerRecord, optimizer: torch.optim.Optimizer, attachment: Attachment) -> None:
        """The row of the current step is completed with the numbers of its guard."""
        record.row["at"] = self._state.steps
        is_unscaled = getattr(optimizer, "grad_scale", None) is not None  # the kernel does it, as the guard knows
        divide_by = 1.0 if is_unscaled else self._state.scaler.unscale_by or 1.0
        if self.guard.reports:
            record.in_flight[attachment.steps] = record.row, divide_by

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        state = self._state
        record = self.record_of(optimizer)
        state.backwards_at_closure = None
        if self._ranks.is_on:
            self._safely(RANKS, self._ranks.after_step, record, optimizer)
        row, record.row = record.row, {}
        evaluations = state.backwards - record.backwards_at_start
        self._sampler.leave_step(record, evaluations)
        if evaluations:
            row["closure"] = evaluations
        self._complete(row, record, optimizer, evaluations)
        if "grad_norm" not in row:
            row["grad_norm"] = None
        if record.in_flight and not self.guard.reports:
            record.give_up_waiting()
        waits_for_guard = False
        if record.in_flight:
            attachment = self.guard.attachment(record, optimizer)
            waits_for_guard = record.is_in_flight(row, 0 if attachment is None else attachment.steps)
        record.series.append(row, waits_for_guard)
        step = state.steps
        if self._context.optimizers.stepped(record):
            state.steps += 1
            if self._context.step_clock is not None:
                self._context.step_clock.stepped(state.steps)
        if self._incidents is not None:
            self._safely("incidents", self._incidents.after_step, record)
        for scheduler in self._context.calls.schedulers:
            self._safely("schedules", follow, scheduler, self.record_of)
        self._sampler.after_step(record, row)
        if state.steps != step:
            self._context.measuring.begin_step(state.steps)
        self._saver.save_if_due()
        if state.steps % RETAINED_EVERY == 0:
            self._safely("kept graphs", self._backward.retained_graphs.count, state.steps)

    def _complete(
        self, row: SeriesRow, record: OptimizerRecord, optimizer: torch.optim.Optimizer, evaluations: int
    ) -> None:
        """Add everything to a row that is known at the end of the step."""
        state, context = self._state, self._context
        backwards = len(context.losses.values)
        row["loss"] = context.losses.close_step(evaluations)
        row["backwards"] = backwards
        row["lr"] = learning_rate(optimizer.param_groups[0])
        if context.calls.last_clip is not None:
            row.update(context.calls.last_clip)  # type: ignore[typeddict-item]
            context.calls.last_clip = None
        if state.scaler.scale is not None:
            row["scale"] = state.scaler.scale
        if record.leftover:
            row["leftover"] = least(record.leftover)
            record.leftover = []
        if context.data.roots_of_step:
            row["roots"] = len(context.data.roots_of_step)
            context.data.roots_of_step.clear()
        state.has_stepped = True
        row["at"] = state.steps
        if context.data.recent:
            record.lines |= context.data.take_lines()

    # Steps that are skipped

    def skipped_by_scaler(self) -> None:
        """A scaler has skipped a step: drop its losses, which belong to no row."""
        self._context.losses.close_skipped_step()
        self._context.data.roots_of_step.clear()
        self._context.events.write(WatchLog.overflow, self._state.steps, self._state.scaler.scale)

    def _found_nonfinite(self, record: OptimizerRecord) -> None:
        """The guard has found non-finite gradients in the current step, which is not applied yet."""
        optimizer, in_closure = record.ref(), self._state.backwards_at_closure is not None
        if optimizer is None or (in_closure and not self.guard.acts):
            return
        self._safely("gradients", self._nonfinite.record, optimizer)
        if not in_closure:
            self._keep_incident(optimizer)

    def _step_arrived(self, record: OptimizerRecord, step: StepRecord) -> None:
        """The numbers of a step have arrived: on a GPU, some steps later."""
        row, divide_by = record.in_flight.pop(step.signals.step, ({"at": self._state.steps}, 1.0))
        norm = step.signals.grad_norm
        row["grad_norm"] = norm if norm is None else float(norm) * float(step.signals.clip_factor) / divide_by
        if norm is not None and not math.isfinite(norm) and "closure" not in row:
            optimizer = record.ref()
            names_them = optimizer is not None and self.guard.trainers.of(optimizer) is not None
            label = str if names_them else self.guard.skipped.label
            self._safely("gradients", self._nonfinite.record_late, row["at"], step, label)
        if self.guard.acts and step.skipped and not step.signals.extra.get(FOUND_BY_SCALER, 0.0):
            row["skipped"] = True
            self._skipped(record, row["at"], step)
        record.series.arrived(row)

    def _skipped(self, record: OptimizerRecord, at: int, step: StepRecord) -> None:
        optimizer = record.ref()
        if optimizer is not None:
            self._safely("gradients", self._nonfinite.record, optimizer)
        event, count = self.guard.skipped.add(record.number, at, step)
        self._context.events.add_skip(event, count)
        if self._incidents is not None:
            self._safely("incidents", self._incidents.skipped, at, record.number)

    def _keep_incident(self, optimizer: torch.optim.Optimizer) -> None:
        if self._incidents is not None and not self._state.scaler.enabled:
            self._safely("incidents", self._incidents.bad_step, optimizer)


class UnmeasuredSteps:
    """Reads one number of each step that is not measured, and records the first step where it is not finite.

    A non-finite value in a backward reaches the gradients of all layers below it, so the first gradient is enough. If
    the script clips by norm, that norm is used instead, and nothing has to be computed.
    """

    def __init__(self, context: WatchContext, nonfinite: NonFiniteGradients) -> None:
        self._context, self._state, self._nonfinite = context, context.state, nonfinite

    def begin(self, row: SeriesRow, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to make a step that is not measured."""
        if self._state.scaler.enabled:  # its overflows are counted elsewhere
            return
        clip = self._context.calls.last_clip or {}
        norm = clip.get("clip_norm")
        # A norm in fp16 overflows although the gradients are finite.
        tells = norm is not None and not (isinstance(norm, Tensor) and norm.dtype == torch.float16)
        self._context.measuring.norms_are_known = tells
        row["first_gradient"] = None if tells else first_gradient(optimizer)

    def take(self, row: SeriesRow) -> None:
        """All numbers of a step have arrived; the step may have been measured or not."""
        if "first_gradient" not in row:
            return
        largest = row.pop("first_gradient")
        number = row.get("clip_norm") if largest is None else largest
        if not isinstance(number, float) or math.isfinite(number):
            return
        row["grad_norm"] = number
        self._context.measuring.expect_trouble(self._state.steps)
        self._nonfinite.record_unmeasured(row)


def first_gradient(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The largest value of the first gradient that can be read; `None` if there is none."""
    with WithoutHooks():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local = None if parameter.grad is None else readable(parameter.grad)
                if local is not None and local.layout is torch.strided and local.numel():
                    largest: Tensor = torch.linalg.vector_norm(real(local.detach()), math.inf)
                    return largest
    return None
