"""Incidents under `surefoot run`: the first step whose loss or gradient is not finite is captured for `surefoot
replay`.

A bad loss is known right after its backward pass, bad gradients right before the optimizer applies them. In both cases
the weights are still those before the step, so nothing has to be copied earlier. The batch and the random streams are
recorded at every step, as for a guarded run (`guard/incident_capture.py`); `bad_step` writes the incident.

Some things differ from a guarded run. The models are found through their calls. Buffers that the forward pass itself
writes, such as batch norm's running statistics, are those after it; a forward pass in training mode does not read them.
If another buffer was written to, the replay is not exact, and the incident has a note. If several optimizers take
turns, a step is what happens between two calls of `step`: the models that take part in it are captured, and the
optimizer of the bad loss or gradient. Only the first bad step is captured: without a guard it is applied, and every
later step is bad because of it. If a GPU lags behind the host, so that without a guard a bad loss is known only after
its step has been applied, no step can be captured, and none is recorded.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.guard.incident_capture import DiskPauses, MicrobatchFollower, StepNotes
from surefoot.record.incidents.bundle import note_action
from surefoot.record.incidents.contents import plain_values
from surefoot.record.incidents.environment import replay_command
from surefoot.watch import autograd_graph as graph
from surefoot.watch.bad_step import BadStep, BufferVersions, FoundStep, parameters_of
from surefoot.watch.first_model_call import FirstModelCall
from surefoot.watch.log_rows import WatchLog
from surefoot.watch.messages import print_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from surefoot.record.incidents.step_capture import StepCapture
    from surefoot.watch.context import WatchContext
    from surefoot.watch.optimizer_record import OptimizerRecord

_ALL_CALLED = 2
"""After this many steps, every model that is part of a step is assumed to have been called."""


class IncidentWriter:
    """Records each step as far as a replay needs it, and captures the first bad one."""

    def __init__(self, context: WatchContext) -> None:
        self._context, self._state, self._probes = context, context.state, context.probes
        self._registry = context.registry
        self.replay_command: str | None = None
        """The command that replays the incident, once there is one."""
        self._notes = StepNotes(
            [],
            torch.device("cpu"),
            between_steps=False,
            on_failure=partial(context.probes.switch_off, "incidents"),
            pauses=DiskPauses(print_line),
        )
        self._microbatches = MicrobatchFollower(self._notes)
        self._loss: Tensor | None = None
        """The loss of the backward in progress."""
        self._buffers = BufferVersions()
        self._versions: dict[int, int] = {}
        """The version of each buffer at the end of the last step."""
        self._bad_loss: float | None = None
        self._first_call = FirstModelCall(self._entered)
        self._parts: set[int] | None = None
        self._reached: set[int] = set()
        """The parameters below a bad loss."""
        self.missed_bad_loss = False
        """Whether a bad loss was known only after its step had been applied."""
        self._kept: tuple[Path, int, int] | None = None
        """The folder of the incident, its step, and the number of its optimizer."""
        self._after: int | None = None
        """The number of the optimizer that stepped last."""

    def optimizer_made(self) -> None:
        """An optimizer was made: calls of models are recorded from now on."""
        self._open()

    def compiled(self) -> None:
        """Something is being compiled; compiled code depends on the existing hooks."""
        self._first_call.close()
        if self._notes.capture is not None:
            self._notes.capture.models.detach()

    def _open(self) -> None:
        if self._notes.capture is not None and not self._state.compiled:
            self._first_call.open()

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called. It may be the first model of this step."""
        if self._notes.capture is None or self._state.compiled or "incidents" in self._probes.problems:
            self._first_call.close()
        elif torch.is_grad_enabled() and self._probes.here():
            self._probes.safely("incidents", self._meet, self._notes.capture, module, args, kwargs)

    def _meet(self, capture: StepCapture, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not capture.models.knows(module):
            if self._parts is None:
                self._parts = capture.models.parts()
            if id(module) in self._parts or not any(each.requires_grad for each in module.parameters()):
                return
            capture.add_models([module])
            self._parts = None
        capture.called_without_hook(module, args, kwargs)
        if self._state.steps >= _ALL_CALLED:
            self._first_call.close()

    def before_backward(self, root: Tensor, value: Any) -> None:
        """`backward` is about to run; `value` is a number unless reading it would wait for the device."""
        if not self._notes.is_noting:
            return
        if not self._context.optimizers.all:
            self._notes.restart(self._state.steps)
        self._loss = root.detach()
        self._bad_loss = value if isinstance(value, float) and not math.isfinite(value) else None
        if self._bad_loss is not None:
            self._reached = {id(leaf) for leaf in graph.leaves(root.grad_fn)}

    def drawn(self) -> list[list[Tensor]]:
        """The tensors of the data loaders' batches for this step that have not been written to."""
        capture, window = self._notes.capture, self._notes.window(self._state.steps)
        if capture is None or window is None:
            return []
        now = capture.under_way.drawn or [seen for each in window.microbatches for seen in each.drawn]
        return [seen.value.tensors for seen in now if not seen.changed]

    def after_backward(self, again: bool, in_closure: bool) -> None:
        """`backward` has finished; the next microbatch or the step follows.

        `again` is true if it is not the first backward in a step that evaluates a closure.
        """
        loss, self._loss = self._loss, None
        if not self._notes.is_noting:
            return
        self._microbatches.ran_backward(loss, again)
        if self._bad_loss is not None:
            owner = self._owner()
            if owner is not None:
                self._keep(owner, f"the loss is {self._bad_loss}", "backward")
        if not in_closure:
            self._open()

    def bad_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to apply gradients that are not finite."""
        if self._notes.is_noting:
            self._keep(optimizer, "", "step")

    def skipped(self, step: int, optimizer: int | None) -> None:
        """The guard has skipped a step: if it is the captured one, this is recorded in its folder."""
        if self._kept is not None and self._kept[1:] == (step, optimizer):
            note_action(self._kept[0], "skip")
            self._kept = None

    def after_step(self, watched: OptimizerRecord) -> None:
        """An optimizer has stepped."""
        if self._notes.capture is None:
            return
        self._after = watched.number
        if self._state.losses_are_late and not self._context.options.guard:
            if self._notes.is_noting:
                self._notes.moved_to(-1, under_way=False, paused=True)
                self._first_call.close()
            return
        if not self._notes.is_noting:
            self._notes.moved_to(self._state.steps, under_way=False)
        models = self._registry.models_now()
        self._notes.capture.add_models(models)
        self._parts = None
        self._versions = self._buffers.of(models)
        self._notes.begin(self._state.steps)
        self._open()

    def _owner(self) -> torch.optim.Optimizer | None:
        """The optimizer that the bad loss belongs to: it must reach its parameters.

        A generator's loss also reaches the discriminator. So among several optimizers, the one that has stepped with a
        backward of this line before is chosen, or else one that has not stepped yet in this round.
        """
        alive = self._context.optimizers.alive()
        able = [(held, o) for held, o in alive if any(p.grad is not None for p in parameters_of(o))]
        reached = [(held, o) for held, o in alive if any(id(p) in self._reached for p in parameters_of(o))]

        def likelihood(candidate: tuple[OptimizerRecord, torch.optim.Optimizer]) -> tuple[bool, bool, bool]:
            held, optimizer = candidate
            line_known = bool(held.lines & self._context.data.recent)
            return line_known, self._context.optimizers.is_due(held), _is_bad(optimizer)

        candidates = reached or able
        return max(candidates, key=likelihood)[1] if candidates else None

    def _keep(self, optimizer: torch.optim.Optimizer, summary: str, ended: str) -> None:
        """Capture the step in progress, and no later one. If the disk fails, a later bad step may be captured."""
        if self._notes.pauses.may_try(self._state.steps) and self._notes.safely(self._write, optimizer, summary, ended):
            self._notes.close()
            self._first_call.close()

    def _write(self, optimizer: torch.optim.Optimizer, summary: str, ended: str) -> bool:
        if self.missed_bad_loss and not self._context.options.guard and not are_finite(parameters_of(optimizer)):
            return True  # bad because of the earlier step, which was not captured: it would show nothing new
        record = self._context.optimizers.find(optimizer)
        assert record is not None, "an optimizer that steps has a record"
        window = self._notes.window(self._state.steps)
        found = FoundStep(optimizer, record, window, self._reached, self._after, self._versions)
        folder = BadStep(self._context, found).write(summary, ended)
        if folder is not None:
            self._kept = folder, self._state.steps, record.number
            self.replay_command = replay_command(folder)
            self._context.events.write(WatchLog.kept, self._state.steps, folder, self.replay_command)
        return True


def _is_bad(optimizer: Any) -> bool:
    """Whether a gradient is not finite."""
    return not are_finite(parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values of some tensors are finite. Waits for the device."""
    return all(bool(plain_values(tensor).isfinite().all()) for tensor in tensors)
