"""Incidents under `surefoot run`: the first step whose loss or gradient is not finite is kept for `surefoot replay`.

The watcher hears of a bad loss right after its backward and of bad gradients right before the optimizer applies them.
In both cases the weights are still those before the step, so nothing has to be copied until then; which batch it was
and where the random streams stood is noted as steps go by, see `record/incidents/notes.py`.

Two things differ from a run with a stabilizer. Buffers that the forward itself writes, batch norm's running statistics,
are as they were after it; a forward in training mode does not read those. Where another buffer was written to, the
replay is not exact, and the incident says so. And only the first bad step is kept: nobody puts this run right again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from surefoot.observe.layout import Layout
from surefoot.record.incidents.bundle import write_incident
from surefoot.record.incidents.contents import faults_of, model_parts, prints_of, window_part
from surefoot.record.incidents.keeper import IncidentKeeper
from surefoot.record.incidents.notes import StepNotes
from surefoot.record.incidents.prints import plain_values
from surefoot.record.incidents.redact import Redactor
from surefoot.record.incidents.surroundings import hardware, script, switches, versions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from surefoot.launch.watcher import Watcher

SIGNALS_KEPT = 50
_NAMES_TOLD = 20


class BlackBox:
    """Notes of the step under way, and the one incident that comes of them."""

    def __init__(self, watcher: Watcher, place: Callable[[], Path], rank: tuple[int, int]) -> None:
        self._watcher, self._place, self._rank = watcher, place, rank
        self._notes: StepNotes | None = StepNotes([], torch.device("cpu"), between_steps=False)
        self._written: dict[int, int] = {}
        self._bad_loss: float | None = None

    def before_backward(self, root: Tensor, value: Any) -> None:
        """`backward` is about to run; the loss is known as a number unless reading it would wait for the device."""
        if self._notes is None:
            return
        self._notes.ran_backward(root, None)
        self._bad_loss = value if isinstance(value, float) and not math.isfinite(value) else None

    def after_backward(self) -> None:
        """`backward` is done: what follows is the next microbatch, or the step."""
        if self._notes is None:
            return
        self._notes.close_microbatch()
        if self._bad_loss is not None:
            owner = self._owner()
            if owner is not None:
                self._keep(owner, f"the loss is {self._bad_loss}", "backward")

    def bad_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to apply gradients that are not finite."""
        if self._notes is not None:
            self._keep(optimizer, "", "step")

    def after_step(self) -> None:
        """An optimizer has stepped."""
        if self._notes is None:
            return
        models = self._watcher.book.models_now()
        self._notes.know(models)
        self._remember_buffers(models)
        self._notes.begin(self._watcher.steps)

    def _owner(self) -> torch.optim.Optimizer | None:
        """The optimizer that the bad loss belongs to. Of several, one whose gradients are bad: others keep old ones."""
        alive = [optimizer for held in self._watcher.optimizers if (optimizer := held.ref()) is not None]
        able = [optimizer for optimizer in alive if any(p.grad is not None for p in _parameters(optimizer))]
        return next(
            (optimizer for optimizer in able if len(able) > 1 and _is_bad(optimizer)), able[0] if able else None
        )

    def _remember_buffers(self, models: Sequence[nn.Module]) -> None:
        for _, buffer in _other_buffers(models):
            self._written.setdefault(id(buffer), buffer._version)

    # ---- the incident ---------------------------------------------------------------------------------------------

    def _keep(self, optimizer: torch.optim.Optimizer, summary: str, ended: str) -> None:
        notes, self._notes = self._notes, None  # the first is the last
        assert notes is not None
        models = self._models(optimizer)
        if not models:
            notes.close()
            return
        redact, left_out = Redactor(), list[str]()
        window, layout = notes.window(self._watcher.steps), Layout(models, optimizer)
        named, gradients = layout.with_gradient()
        by_name = {name: gradient for (name, _), gradient in zip(named, gradients, strict=True)}
        prints = prints_of(window, None, by_name, {})
        bad = [name for name, each in prints["gradients"].items() if each.get("nonfinite")]
        summary = summary or f"{len(bad)} of {len(by_name)} gradients are not finite, first {bad[0] if bad else '?'}"
        inexact = [*faults_of(window), *self._faults(models)]
        keeper = IncidentKeeper(self._place(), most=1_000_000)  # the folder is this process's own, its rank included
        place = keeper.place(self._watcher.steps)
        facts = {
            "step": self._watcher.steps,
            "part": "",
            "kind": "nonfinite",
            "severity": "error",
            "summary": summary,
            "action": "skip" if self._watcher.guard and ended == "step" else "none",
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
        notes.close()
        self._watcher.incident = str(place)

    def _models(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """The models that the optimizer trains."""
        trained = {id(parameter) for parameter in _parameters(optimizer)}
        known = self._watcher.book.models_now()
        return [model for model in known if any(id(parameter) in trained for parameter in model.parameters())]

    def _faults(self, models: Sequence[nn.Module]) -> list[str]:
        found = []
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
        watched = self._watcher.watched(optimizer)
        watched.series.read()
        rows = list(watched.series.rows)[-SIGNALS_KEPT:]
        names = ("loss", "grad_norm", "lr", "scale", "skipped")
        return [{"step": row.get("at", row.get("step"))} | {name: row.get(name) for name in names} for row in rows]

    def _configuration(self, models: Sequence[nn.Module], optimizer: Any, ended: str) -> dict[str, Any]:
        scale = self._watcher.scaler.get("scale") if self._watcher.scaler.get("enabled") else None
        return {
            "loop": "bare",
            "ended": ended,
            "models": [type(model).__name__ for model in models],
            "optimizer": type(optimizer).__name__,
            "lr": optimizer.param_groups[0].get("lr"),
            "groups": self._watcher.watched(optimizer).settings,
            "schedulers": [each["type"] for each in self._watcher.schedulers],
            "loss_scale": scale,
            "guard": self._watcher.guard,
        }


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
