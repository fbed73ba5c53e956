"""Describes the first bad step of a watched run, to be written like every incident (`guard/captured_step.py`).

Only a watched run knows which models are part of the step, which optimizer was stepping, and what the loop did in
between.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from surefoot.guard.captured_step import SIGNALS_KEPT, CapturedStep
from surefoot.observe.parameters import Layout, learning_rate
from surefoot.record.incidents.bundle import IncidentKeeper
from surefoot.record.incidents.contents import faults_of, model_parts, prints_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from surefoot.record.incidents.step_capture import Window
    from surefoot.watch.context import WatchContext
    from surefoot.watch.optimizer_record import OptimizerRecord

LOOKED_UP_EVERY = 64
"""The buffers of a model are looked up again after this many steps."""

NAMES_KEPT = 20


class FoundStep(NamedTuple):
    """What is known about a bad step."""

    optimizer: torch.optim.Optimizer
    record: OptimizerRecord
    window: Window | None
    """Its batches and calls; `None` if they were not captured."""
    reached: set[int]
    """The identities of the parameters under a bad loss."""
    after: int | None
    """The number of the optimizer that stepped last."""
    buffers: dict[int, int]
    """The version of each buffer at the end of the last step."""


class BadStep:
    """One bad step, which can be written as an incident."""

    def __init__(self, context: WatchContext, found: FoundStep) -> None:
        self._context, self._found, self._registry = context, found, context.registry
        self._rank = context.options.rank, context.options.world_size

    def write(self, summary: str, ended: str) -> Path | None:
        """Write the incident and return its folder; `None` if no model is part of the step.

        Args:
            summary: One sentence; empty to describe the gradients.
            ended: What the step ended with: `backward` or `step`.
        """
        found, step = self._found, self._context.state.steps
        models = self._models(found.optimizer, found.window)
        if not models or self._context.options.folder is None:
            return None
        layout = Layout(models, found.optimizer)
        named, gradients = layout.with_gradient()
        by_name = {name: gradient for (name, _), gradient in zip(named, gradients, strict=True)}
        prints = prints_of(found.window, None, by_name, {})
        bad = [name for name, each in prints["gradients"].items() if each.get("nonfinite")]
        words = f"{len(bad)} of {len(by_name)} gradients are not finite, first {bad[0] if bad else '?'}"
        captured = CapturedStep(
            step=step,
            event={
                "kind": "nonfinite",
                "severity": "error",
                "summary": summary or words,
                "action": "none",  # the guard may still skip the step: `IncidentWriter.skipped`
                "evidence": {"parameters": bad[:NAMES_KEPT]},
            },
            rank=self._rank[0],
            world_size=self._rank[1],
            inexact=[*faults_of(found.window), *self._faults(models, found.window, found.optimizer)],
            applied_since=0,
            signals=self._signals(),
            configuration=self._configuration(models, found.optimizer, ended),
            home=layout.home,
            state={**model_parts(models), "optimizer": found.optimizer.state_dict()},
            window=found.window,
            gradients=by_name,
            prints=prints,
        )
        # The folder belongs to this process: its name includes the rank.
        keeper = IncidentKeeper(self._context.options.folder(), most=1_000_000)
        place = keeper.place(step)
        captured.write(place, keeper)
        return place

    def _models(self, optimizer: torch.optim.Optimizer, window: Window | None) -> list[nn.Module]:
        """The models of the optimizer, those below the bad loss, and trained ones that were called in the step."""
        wanted = self._found.reached | {id(parameter) for parameter in parameters_of(optimizer)}
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
        return [number for number, optimizer in alive if any(id(p) in own for p in parameters_of(optimizer))]

    def _faults(
        self, models: Sequence[nn.Module], window: Window | None, optimizer: torch.optim.Optimizer
    ) -> list[str]:
        found = []
        called = _callers(window)
        wanted = self._found.reached or {id(parameter) for parameter in parameters_of(optimizer)}
        earlier = [
            self._label(model)
            for model in models
            if called and model not in called and any(id(p) in wanted for p in model.parameters())
        ]
        if earlier and self._found.after is not None:
            found.append(
                f"the forward pass of {', '.join(earlier)} ran before another optimizer's step, and a replay starts "
                "after that"
            )
        written = [name for name, buffer in other_buffers(models) if self._has_changed(buffer)]
        if written:
            found.append(f"buffers changed during the step ({', '.join(written[:3])}); their values after it were kept")
        if self._rank[1] > 1:
            found.append(
                f"gradients may have been averaged over {self._rank[1]} processes, of which this is one: only the "
                "loss of this one can be compared"
            )
        return found

    def _has_changed(self, buffer: Tensor) -> bool:
        return buffer._version != self._found.buffers.get(id(buffer), buffer._version)

    def _signals(self) -> list[dict[str, Any]]:
        watched = self._found.record
        watched.series.read()
        rows = list(watched.series.rows)[-SIGNALS_KEPT:]
        names = ("loss", "grad_norm", "lr", "scale", "skipped")
        return [{"step": row.get("at", row.get("step"))} | {name: row.get(name) for name in names} for row in rows]

    def _configuration(self, models: Sequence[nn.Module], optimizer: Any, ended: str) -> dict[str, Any]:
        scale = self._context.state.scaler.scale if self._context.state.scaler.enabled else None
        rate = learning_rate(optimizer.param_groups[0])
        return {
            "loop": "bare",
            "ended": ended,
            "models": self._names(models),
            "optimizer": type(optimizer).__name__,
            "lr": None if rate is None else float(rate),
            "groups": [group.values for group in self._found.record.settings],
            "schedulers": [each.type for each in self._context.calls.schedulers],
            "loss_scale": scale,
            "guard": self._context.options.guard,
            "turn": {
                "optimizer": self._found.record.number,
                "after": self._found.after,
                "trained_by": [self._trained_by(model) for model in models],
            },
        }

    def _names(self, models: Sequence[nn.Module]) -> list[str]:
        """The names of several models with their numbers, which are the prefixes of their parameters' names."""
        if len(models) == 1:
            return [type(models[0]).__name__]
        return [f"{number}: {self._label(model)}" for number, model in enumerate(models)]

    def _label(self, model: nn.Module) -> str:
        """A model's name in the script, and its type."""
        name, kind = self._registry.known_model(model), type(model).__name__
        return kind if name in (None, kind) else f"{name} ({kind})"


def parameters_of(optimizer: Any) -> list[Tensor]:
    """The parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _callers(window: Window | None) -> list[nn.Module]:
    """The models that were called in a step."""
    held = [] if window is None else [caller() for each in window.microbatches for caller in each.callers]
    return [caller for caller in held if caller is not None]


def other_buffers(models: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """Floating buffers outside of normalization layers, whose training forward reads them if anybody wrote them."""
    return [
        (f"{path}.{name}" if path else name, buffer)
        for model in models
        for path, module in model.named_modules()
        if not isinstance(module, _NormBase)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point() and not buffer.is_inference()
    ]


class BufferVersions:
    """Counts the writes to the buffers of models. The list of buffers is refreshed every few steps."""

    def __init__(self) -> None:
        self._models: list[int] = []
        self._places: list[tuple[weakref.ref[nn.Module], str]] = []
        self._uses = 0

    def of(self, models: Sequence[nn.Module]) -> dict[int, int]:
        """The number of writes to each buffer of `other_buffers`, by identity."""
        known = [id(model) for model in models]
        if known != self._models or self._uses % LOOKED_UP_EVERY == 0:
            self._models = known
            self._places = [
                (weakref.ref(module), name)
                for model in models
                for module in model.modules()
                if not isinstance(module, _NormBase)
                for name, _ in module._buffers.items()
            ]
        self._uses += 1
        buffers = [getattr(module, name, None) for held, name in self._places if (module := held()) is not None]
        return {
            id(buffer): buffer._version
            for buffer in buffers
            if isinstance(buffer, Tensor) and buffer.is_floating_point() and not buffer.is_inference()
        }
