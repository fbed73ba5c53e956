"""Observes every `backward` call: the loss and its graph before it, and the gradients after it.

In a script without an optimizer, each backward call counts as a step.
"""

from __future__ import annotations

import math
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.core.user_code import users_line
from surefoot.core.without_hooks import WithoutHooks
from surefoot.observe.readable import has_other_ranks, is_result, readable
from surefoot.record.facts import NonFiniteLoss, NonFiniteLossEvent, SpikeEvent
from surefoot.watch import autograd_graph as graph
from surefoot.watch.accumulated_loss import share_of
from surefoot.watch.data_origin import draws_ahead
from surefoot.watch.log_rows import WatchLog
from surefoot.watch.loss_level import LossLevels, data_under
from surefoot.watch.loss_readings import LossPlace, LossReadings
from surefoot.watch.measuring_budget import SPIKES_FOLLOWED
from surefoot.watch.nonfinite_origin import find_origin
from surefoot.watch.optimizer_record import left_share
from surefoot.watch.optimizer_updates import keep_gradient
from surefoot.watch.replica_looks import PROBE as RANKS
from surefoot.watch.retained_graphs import RetainedGraphCounter
from surefoot.watch.step_recording import BackwardPlace, StepRecording
from surefoot.watch.step_rows import StepRows
from surefoot.watch.user_frames import name_of, site, user_frame

if TYPE_CHECKING:
    from surefoot.watch.compiled_inputs import CompiledInputs
    from surefoot.watch.context import WatchContext
    from surefoot.watch.incidents import IncidentWriter
    from surefoot.watch.parameter_registry import ParameterRegistry
    from surefoot.watch.replica_looks import ReplicaLooks
    from surefoot.watch.step_sampler import StepSampler


MANUAL_STEPS = 6
"""The number of steps sampled in a loop without an optimizer."""


class BackwardObserver:
    """Is called before and after each backward of the script."""

    def __init__(
        self,
        context: WatchContext,
        sampler: StepSampler,
        incidents: IncidentWriter | None,
        compiled_inputs: CompiledInputs,
        ranks: ReplicaLooks,
    ) -> None:
        self._context, self._sampler, self._incidents = context, sampler, incidents
        self._compiled_inputs, self._ranks = compiled_inputs, ranks
        self._state, self._safely = context.state, context.probes.safely
        self.series = StepRows()
        """One row per backward, until the first step of an optimizer."""
        self.manual = ManualLoop()
        self.retained_graphs = RetainedGraphCounter()
        self._readings = LossReadings()
        self._levels = LossLevels()
        self._origin_found = self._is_known_late = False
        self._unscaled: tuple[weakref.ref[Tensor], Tensor] | None = None

    def loss_scaled(self, scaled: weakref.ref[Tensor], loss: Tensor) -> None:
        """A gradient scaler has multiplied a loss; `loss` is the value before."""
        self._unscaled = scaled, loss

    def before(self, root: Tensor) -> None:
        """`backward` is about to run on `root`."""
        state, clock = self._state, self._context.step_clock
        state.backwards += 1
        if clock is not None:
            clock.backward_begins()
        is_repeated = state.backwards_at_closure is not None and state.is_repeated_evaluation()
        recorder = None if state.sampled is None else state.sampled.recorder
        if recorder is not None and recorder.in_step and not recorder.has_closure:  # the last step has raised
            recorder.leave_step()
        loss, is_scaled = self._loss_of(root)
        if not self._context.optimizers.all:  # the previous backward was a complete step
            self._context.losses.close_step(0)
            self._context.data.roots_of_step.clear()
        if loss is None:  # a loss that has no value in this process
            return
        line = users_line(sys._getframe(3))
        value, copy = self._readings.read(loss, LossPlace(state.steps, state.backwards, line, is_repeated))
        state.losses_are_late = value is None
        self._judge_late()
        known: Any = loss if value is None else value
        self._context.losses.add(known, self._safely("microbatches", share_of, root, is_scaled), copy)
        if self._incidents is not None:
            self._safely("incidents", self._incidents.before_backward, root, known)
        if not state.has_stepped:
            self.series.append({"loss": known})
        if not self._context.optimizers.all and not self.manual.is_known():
            self.manual.find(root, self._context.registry)
        if value is not None:
            self._judge(root, value, line, is_repeated)
        if not is_repeated:
            self._record_graph(root, value, line)

    def _loss_of(self, root: Tensor) -> tuple[Tensor | None, bool]:
        """The loss without the scale of a gradient scaler, and whether there was one."""
        value, is_scaled = root, False
        if self._unscaled is not None:
            ref, original = self._unscaled
            if ref() is root:
                value, is_scaled = original, True
        if is_result(value):
            return value.detach(), is_scaled
        with WithoutHooks():
            local = readable(value)
        if local is None:
            return None, is_scaled
        local = local.detach()
        return (local if local.numel() == 1 else local.float().mean()), is_scaled

    def _judge(self, root: Tensor, value: float, line: Any, is_repeated: bool) -> None:
        """Record the first loss that is not finite, and losses far above the others."""
        if not math.isfinite(value):
            self._context.measuring.expect_trouble(self._state.steps)
            if not self._origin_found:
                self._origin_found = True
                self._safely("autopsy", self._record_nonfinite, root, value)
        elif not is_repeated and self._levels.is_spike(value, line):
            self._context.measuring.after_spike(self._state.steps)
            self._safely("spikes", self._record_spike, root, value)

    def _judge_late(self, wait: bool = False) -> None:
        """Judge the losses that have arrived from the device after their backward; their graphs no longer exist."""
        for place, value in self._readings.late(wait):
            if not math.isfinite(value):
                self._readings.expect_trouble(self._state.steps)
                self._context.measuring.expect_trouble(self._state.steps)
                if self._incidents is not None:
                    self._incidents.missed_bad_loss = True
                if not self._origin_found and not self._is_known_late:
                    self._is_known_late = True
                    self._safely("autopsy", self._record_late, place, value)
            elif not place.is_repeated and self._levels.is_spike(value, place.line):
                self._context.measuring.after_spike(self._state.steps)
                self._safely("spikes", self._record_spike, None, value, place)

    def _record_late(self, place: LossPlace, value: float) -> None:
        """Record a loss that was not finite some steps ago. Its data (`step_data`) is known; its graph is not."""
        late = NonFiniteLoss(value=value, kind="unknown")
        found = self._compiled_inputs.explain(late, place.backward, is_late=True)
        self._context.events.add(NonFiniteLossEvent.at(place.step, found))

    def settle(self) -> None:
        """Judge every loss that is still being copied. Waits for the device."""
        self._judge_late(wait=True)

    def _record_graph(self, root: Tensor, value: float | None, line: Any) -> None:
        state = self._state
        is_due = state.backwards <= 128 or (state.backwards % 16 == 0 and state.backwards < 1 << 14)
        if root.grad_fn is not None and is_due:
            self._safely("kept graphs", self.retained_graphs.add_token, root)
        if state.sampled is not None:
            place = BackwardPlace(
                site=site(4),
                value=value,
                backward=state.backwards,
                step=state.steps,
            )
            self._safely("graph", state.sampled.before_backward, root, place)
            self._safely("left-over gradients", self._check_leftover, state.sampled)
        if line is not None:
            self._context.data.roots_of_step.add(line)
            self._safely("data of steps", self._context.data.note, root, line, state.steps, state.backwards)

    def after(self, gradients: Any = None) -> None:
        """`backward` has finished; `gradients` are those that were returned instead of accumulated."""
        state = self._state
        if self._incidents is not None:
            in_closure = state.backwards_at_closure is not None
            is_repeated = in_closure and state.is_repeated_evaluation()
            self._safely("incidents", self._incidents.after_backward, is_repeated, in_closure)
        if state.sampled is not None:
            self._sampler.after_backward()
        if self._ranks.is_on:
            self._safely(RANKS, self._ranks.after_backward)
        if not self._context.optimizers.all:
            self._after_manual_backward(gradients)

    def _after_manual_backward(self, gradients: Any) -> None:
        state, clock = self._state, self._context.step_clock
        state.steps += 1
        if clock is not None:
            clock.stepped(state.steps)
        norm = self.manual.gradient_norm(gradients)
        if norm is not None and self.series.rows:
            self.series.rows[-1]["grad_norm"] = norm
        if self.series.rows and not self.series.waits:
            self._context.events.write(WatchLog.step, self.series.rows[-1], 0)
        if state.sampled is not None and state.backwards <= MANUAL_STEPS:  # the next step is sampled, too
            self._safely("parameters", self.manual.keep_gradients, self._context.registry)
        self._sampler.end()
        if state.backwards <= MANUAL_STEPS:
            self._sampler.begin()

    # Bad losses

    def _record_nonfinite(self, root: Tensor, value: float) -> None:
        found = self.origin_of(root, value, self._state.backwards, self._sampler.origins_now())
        self._context.events.add(NonFiniteLossEvent.at(self._state.steps, found))

    def origin_of(
        self, root: Tensor, value: float, backward: int, origins: dict[str, list[tuple[str, str, str]]]
    ) -> NonFiniteLoss:
        """The origin of a non-finite loss, from its graph and from the inputs of compiled calls."""

        def follow(facts: NonFiniteLoss, tensor: Tensor | None) -> NonFiniteLoss:
            """Add the operations through which non-finite data passed, and whether it was finite before them."""
            is_known = self._incidents is not None and not draws_ahead(self._context.calls.batches)
            drawn = self._incidents.drawn() if self._incidents is not None and is_known else []
            return self._sampler.data_origin(facts, tensor, drawn)

        found = find_origin(root, value, self._context.registry, origins, follow)
        return self._compiled_inputs.explain(found, backward)

    def _record_spike(self, root: Tensor | None, value: float, place: LossPlace | None = None) -> None:
        """Record the data tensors of a loss far above the others; none if the loss became known only now."""
        levels = self._levels
        held = [] if root is None else data_under(root)
        step, backward = (self._state.steps, self._state.backwards) if place is None else (place.step, place.backward)
        level = levels.middle()
        if levels.spikes <= SPIKES_FOLLOWED and not has_other_ranks():
            self._sampler.sample_soon()
        self._context.events.add(
            SpikeEvent(
                step=step,
                value=value,
                level=level,
                data=held,
                backward=backward,
                began=levels.began(),
            )
        )

    def _check_leftover(self, sampled: StepRecording) -> None:
        """Record the share of the parameters reached by the backward that still have a nonzero gradient.

        Others may have one: a generator's gradient is not cleared before the discriminator's backward.
        """
        if self.manual.is_known() and self.series.count > 1:
            self.series.rows[-1]["leftover"] = self.manual.left_share()
        number_of = self._context.registry.id_of
        reached = set(sampled.backward_calls[-1].parameters) if sampled.backward_calls else set()
        for record, optimizer in self._context.optimizers.alive():
            tensors = [t for group in optimizer.param_groups for t in group["params"] if number_of(t) in reached]
            if record.series.count and tensors:
                record.leftover.append(left_share(tensors))


class ManualLoop:
    """A loop without an optimizer: the leaves of the first graph are its parameters, and each backward is a step.

    The parameters are held weakly, and named after the script's variables. What the script does with the gradients
    afterwards is not followed.
    """

    def __init__(self) -> None:
        self._held: list[weakref.ref[Tensor]] = []

    def tensors(self) -> list[Tensor]:
        """The parameters that still exist."""
        return [tensor for ref in self._held if (tensor := ref()) is not None]

    def is_known(self) -> bool:
        """Whether the parameters were found."""
        return bool(self._held)

    def find(self, root: Tensor, registry: ParameterRegistry) -> None:
        """Take the leaves below a loss as the parameters."""
        found = [leaf for leaf in graph.leaves(root.grad_fn) if leaf.dim() or leaf.numel() == 1]
        frame = user_frame(4)
        for leaf in found:
            record = registry.add(leaf)
            if not record.name:
                record.name = name_of(leaf, frame)
        self._held = [weakref.ref(leaf) for leaf in found]

    def drop_references(self) -> list[Tensor]:
        """Drop the weak references; `add_references` creates them again."""
        tensors, self._held = self.tensors(), []
        return tensors

    def add_references(self, tensors: list[Tensor]) -> None:
        """Create weak references to the parameters again."""
        self._held = [weakref.ref(tensor) for tensor in tensors]

    def left_share(self) -> float:
        """The share of the parameters that still has a nonzero gradient."""
        return float(left_share(self.tensors()))

    def keep_gradients(self, registry: ParameterRegistry) -> None:
        """Keep some of the accumulated gradients until the next sampled step shows where the parameters went."""
        for tensor in self.tensors():
            if (record := registry.get(tensor)) is not None and record.sample is not None:
                keep_gradient(record)

    def gradient_norm(self, gradients: Any) -> float | None:
        """The norm of the gradients that `autograd.grad` returned, or else of those that were accumulated."""
        grads = [tensor.grad for tensor in self.tensors() if tensor.grad is not None]
        with WithoutHooks():
            held = [readable(grad) for grad in gradients or grads if isinstance(grad, Tensor)]
            dense = [
                grad if grad.layout is torch.strided else grad.coalesce().values() for grad in held if grad is not None
            ]
            norms = [torch.linalg.vector_norm(grad.float()) for grad in dense]
            return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else None
