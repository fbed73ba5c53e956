"""Incidents under `surefoot run`: the first step whose loss or gradient is not finite is kept for `surefoot replay`.

The watcher hears of a bad loss right after its backward and of bad gradients right before the optimizer applies them.
In both cases the weights are still those before the step, so nothing has to be copied until then; which batch it was
and where the random streams stood is noted as steps go by, see `record/incidents/step_capture.py`.

Some things differ from a run with a stabilizer. Buffers that the forward itself writes, batch norm's running
statistics, are as they were after it; a forward in training mode does not read those. Where another buffer was written
to, the replay is not exact, and the incident says so. Where several optimizers take turns, a step is what lies between
two calls of `step`: the models that take part in it are kept, and the optimizer that the bad loss or gradient is for.
And only the first bad step is kept: nobody puts this run right again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from surefoot.core.redaction import Redactor
from surefoot.observe.parameters import Layout
from surefoot.record.incidents.bundle import note_action, write_incident
from surefoot.record.incidents.contents import faults_of, model_parts, prints_of, window_part
from surefoot.record.incidents.environment import hardware, replay_command, script, switches, versions
from surefoot.record.incidents.fingerprints import plain_values
from surefoot.record.incidents.retention import IncidentKeeper
from surefoot.record.incidents.step_capture import StepCapture
from surefoot.watch import autograd_graph as graph
from surefoot.watch.first_model_call import FirstModelCall

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from surefoot.record.incidents.step_capture import Window
    from surefoot.watch.context import WatchContext
    from surefoot.watch.optimizer_record import OptimizerRecord

SIGNALS_KEPT = 50
_NAMES_TOLD = 20
_ALL_MET = 2
"""After so many steps every model that is part of one is taken to have been called."""


class IncidentWriter:
    """Notes of the step under way, and the one incident that comes of them."""

    def __init__(self, context: WatchContext) -> None:
        self._context, self._state, self._probes = context, context.state, context.probes
        self._registry = context.registry
        self._rank = context.options.rank, context.options.world_size
        self.replay_command: str | None = None
        """The command that replays the incident, once there is one."""
        self._notes: StepCapture | None = StepCapture([], torch.device("cpu"), between_steps=False)
        self._written: dict[int, int] = {}
        self._bad_loss: float | None = None
        self._door = FirstModelCall(self._entered)
        self._parts: set[int] | None = None
        self._reached: set[int] = set()
        """The parameters under a bad loss."""
        self._kept: tuple[Path, int, int] | None = None
        """The folder of the incident, its step, and the number of its optimizer."""
        self._after: int | None = None
        """The number of the optimizer that stepped last."""

    def optimizer_made(self) -> None:
        """Something will train: from here on calls of models are of interest."""
        self._open()

    def compiled(self) -> None:
        """Something is compiled, which depends on the hooks that are there."""
        self._door.shut()
        if self._notes is not None:
            self._notes.models.detach()

    def _open(self) -> None:
        if self._notes is not None and not self._state.compiled:
            self._door.open()

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called, and it may be the first model of this step."""
        if self._notes is None or self._state.compiled or "incidents" in self._probes.problems:
            self._door.shut()
        elif torch.is_grad_enabled() and self._probes.here():
            self._probes.safely("incidents", self._meet, self._notes, module, args, kwargs)

    def _meet(self, notes: StepCapture, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not notes.models.knows(module):
            if self._parts is None:
                self._parts = notes.models.parts()
            if id(module) in self._parts or not any(each.requires_grad for each in module.parameters()):
                return
            notes.know([module])
            self._parts = None
        notes.met(module, args, kwargs)
        if self._state.steps >= _ALL_MET:
            self._door.shut()

    def before_backward(self, root: Tensor, value: Any, again: bool) -> None:
        """`backward` is about to run; the loss is known as a number unless reading it would wait for the device.

        `again` says that it is not the first time in a step that evaluates a closure.
        """
        if self._notes is None:
            return
        if again:
            self._notes.ran_again(root)
        else:
            self._notes.ran_backward(root, None)
        self._bad_loss = value if isinstance(value, float) and not math.isfinite(value) else None
        if self._bad_loss is not None:
            self._reached = {id(leaf) for leaf in graph.leaves(root.grad_fn)}

    def drawn(self) -> list[list[Tensor]]:
        """The tensors of the batches that data loaders handed out for this step, unless they were written to since."""
        window = None if self._notes is None else self._notes.window(self._state.steps)
        if self._notes is None or window is None:
            return []
        now = self._notes.under_way.drawn or [seen for each in window.microbatches for seen in each.drawn]
        return [seen.value.tensors for seen in now if not seen.changed]

    def after_backward(self, again: bool, in_closure: bool) -> None:
        """`backward` is done: what follows is the next microbatch, or the step."""
        if self._notes is None:
            return
        if not again:
            self._notes.close_microbatch()
        if self._bad_loss is not None:
            owner = self._owner()
            if owner is not None:
                self._keep(owner, f"the loss is {self._bad_loss}", "backward")
        if not in_closure:
            self._open()

    def bad_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to apply gradients that are not finite."""
        if self._notes is not None:
            self._keep(optimizer, "", "step")

    def left_out(self, step: int, optimizer: int | None) -> None:
        """The guard has left out a step: if it is the one that was kept, its folder says so."""
        if self._kept is not None and self._kept[1:] == (step, optimizer):
            note_action(self._kept[0], "skip")
            self._kept = None

    def after_step(self, watched: OptimizerRecord) -> None:
        """An optimizer has stepped."""
        if self._notes is None:
            return
        self._after = watched.number
        models = self._registry.models_now()
        self._notes.know(models)
        self._parts = None
        self._remember_buffers(models)
        self._notes.begin(self._state.steps)
        self._open()

    def _owner(self) -> torch.optim.Optimizer | None:
        """The optimizer that the bad loss is for: one whose parameters it reaches, others keep old gradients.

        A generator's loss reaches the discriminator too. So of several it is the one that has stepped with a backward
        of this line before, or else one whose turn it is.
        """
        alive = self._context.optimizers.alive()
        able = [(held, o) for held, o in alive if any(p.grad is not None for p in _parameters(o))]
        reached = [(held, o) for held, o in alive if any(id(p) in self._reached for p in _parameters(o))]

        def likeliness(candidate: tuple[OptimizerRecord, torch.optim.Optimizer]) -> tuple[bool, bool, bool]:
            held, optimizer = candidate
            line_known = bool(held.lines & self._context.data.recent)
            return line_known, self._context.optimizers.is_due(held), _is_bad(optimizer)

        candidates = reached or able
        return max(candidates, key=likeliness)[1] if candidates else None

    def _remember_buffers(self, models: Sequence[nn.Module]) -> None:
        self._written = {id(buffer): buffer._version for _, buffer in _other_buffers(models)}

    # ---- the incident ---------------------------------------------------------------------------------------------

    def _keep(self, optimizer: torch.optim.Optimizer, summary: str, ended: str) -> None:
        notes, self._notes = self._notes, None  # the first is the last
        assert self._context.options.folder is not None
        self._door.shut()
        assert notes is not None
        window = notes.window(self._state.steps)
        models = self._models(optimizer, window)
        if not models:
            notes.close()
            return
        redact, left_out, layout = Redactor(), list[str](), Layout(models, optimizer)
        named, gradients = layout.with_gradient()
        by_name = {name: gradient for (name, _), gradient in zip(named, gradients, strict=True)}
        prints = prints_of(window, None, by_name, {})
        bad = [name for name, each in prints["gradients"].items() if each.get("nonfinite")]
        summary = summary or f"{len(bad)} of {len(by_name)} gradients are not finite, first {bad[0] if bad else '?'}"
        inexact = [*faults_of(window), *self._faults(models, window, optimizer)]
        keeper = IncidentKeeper(
            self._context.options.folder(), most=1_000_000
        )  # the folder is this process's own, its rank included
        place = keeper.place(self._state.steps)
        facts = {
            "step": self._state.steps,
            "part": "",
            "kind": "nonfinite",
            "severity": "error",
            "summary": summary,
            "action": "none",  # a guard has yet to judge the step: `left_out`
            "evidence": {"parameters": bad[:_NAMES_TOLD]},
            "exact": not inexact,
            "inexact": inexact,
            "applied_since": 0,
            "rank": self._rank[0],
            "world_size": self._rank[1],
            "signals": self._signals(optimizer),
            "configuration": self._configuration(models, optimizer, ended),
            "versions": versions(),
            "hardware": hardware(layout.home),
            "switches": switches(),
            "script": script(redact),
            "fingerprints": prints,
            "left_out": left_out,
        }
        tree = {
            **model_parts(models),
            "optimizer": optimizer.state_dict(),
            "window": None if window is None else window_part(window, redact, left_out),
            "gradients": by_name,
        }
        write_incident(place, facts, tree, keeper, redact)
        self._kept = place, self._state.steps, self._record(optimizer).number
        notes.close()
        self.replay_command = replay_command(place)

    def _models(self, optimizer: torch.optim.Optimizer, window: Window | None) -> list[nn.Module]:
        """Those that the optimizer trains, those under the bad loss, and trained ones that were called in the step."""
        wanted = self._reached | {id(parameter) for parameter in _parameters(optimizer)}
        called = _callers(window)
        met = [*self._registry.models_now(), *called]
        inner = {id(part) for model in met for part in model.modules() if part is not model}
        return [
            model
            for model in dict.fromkeys(met)
            if id(model) not in inner
            and (
                any(id(parameter) in wanted for parameter in model.parameters())
                or (model in called and self._trained_by(model))
            )
        ]

    def _trained_by(self, model: nn.Module) -> list[int]:
        """The numbers of the optimizers that train a model."""
        own = {id(parameter) for parameter in model.parameters()}
        alive = [(record.number, optimizer) for record, optimizer in self._context.optimizers.alive()]
        return [number for number, optimizer in alive if any(id(p) in own for p in _parameters(optimizer))]

    def _faults(
        self, models: Sequence[nn.Module], window: Window | None, optimizer: torch.optim.Optimizer
    ) -> list[str]:
        found = []
        called = _callers(window)
        wanted = self._reached or {id(parameter) for parameter in _parameters(optimizer)}
        earlier = [
            self._label(model)
            for model in models
            if called and model not in called and any(id(p) in wanted for p in model.parameters())
        ]
        if earlier and self._after is not None:
            found.append(
                f"the forward of {', '.join(earlier)} was run before another optimizer's step, and a replay begins "
                "after that"
            )
        written = [name for name, buffer in _other_buffers(models) if self._has_changed(buffer)]
        if written:
            found.append(f"buffers were written to during the step ({', '.join(written[:3])}); they are as after it")
        if self._rank[1] > 1:
            found.append(
                f"gradients may have been averaged over {self._rank[1]} processes, of which this is one: only the "
                "loss of this one can be compared"
            )
        return found

    def _has_changed(self, buffer: Tensor) -> bool:
        return buffer._version != self._written.get(id(buffer), buffer._version)

    def _signals(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        watched = self._record(optimizer)
        watched.series.read()
        rows = list(watched.series.rows)[-SIGNALS_KEPT:]
        names = ("loss", "grad_norm", "lr", "scale", "skipped")
        return [{"step": row.get("at", row.get("step"))} | {name: row.get(name) for name in names} for row in rows]

    def _configuration(self, models: Sequence[nn.Module], optimizer: Any, ended: str) -> dict[str, Any]:
        scale = self._state.scaler.scale if self._state.scaler.enabled else None
        return {
            "loop": "bare",
            "ended": ended,
            "models": self._names(models),
            "optimizer": type(optimizer).__name__,
            "lr": optimizer.param_groups[0].get("lr"),
            "groups": self._record(optimizer).settings,
            "schedulers": [each.type for each in self._context.calls.schedulers],
            "loss_scale": scale,
            "guard": self._context.options.guard,
            "turn": {
                "optimizer": self._record(optimizer).number,
                "after": self._after,
                "trained_by": [self._trained_by(model) for model in models],
            },
        }

    def _record(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        record = self._context.optimizers.find(optimizer)
        assert record is not None, "an optimizer that steps has a record"
        return record

    def _names(self, models: Sequence[nn.Module]) -> list[str]:
        """Of several models each with its number, which the names of its parameters begin with."""
        if len(models) == 1:
            return [type(models[0]).__name__]
        return [f"{number}: {self._label(model)}" for number, model in enumerate(models)]

    def _label(self, model: nn.Module) -> str:
        """A model's name in the script, and its type."""
        name, kind = self._registry.known_model(model), type(model).__name__
        return kind if name in (None, kind) else f"{name} ({kind})"


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _callers(window: Window | None) -> list[nn.Module]:
    """The models that were called in a step."""
    held = [] if window is None else [caller() for each in window.microbatches for caller in each.callers]
    return [caller for caller in held if caller is not None]


def _is_bad(optimizer: Any) -> bool:
    """Whether a gradient is not finite."""
    gradients = (parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None)
    return any(not bool(plain_values(gradient).isfinite().all()) for gradient in gradients)


def _other_buffers(models: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """Floating buffers outside of normalization layers, whose training forward reads them if anybody wrote them."""
    return [
        (f"{path}.{name}" if path else name, buffer)
        for model in models
        for path, module in model.named_modules()
        if not isinstance(module, _NormBase)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point() and not buffer.is_inference()
    ]
