"""Load the state of an incident into live objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surefoot.core.save_restore import write
from surefoot.errors import UsageError
from surefoot.keep.checkpoint.tree import local_part
from surefoot.keep.restore import load_models, load_optimizer

if TYPE_CHECKING:
    from surefoot.record.incidents.contents import ModelModes
    from surefoot.record.incidents.reading import StoredIncident

_MOST_NAMED = 4


def put_in_place(
    incident: StoredIncident, models: Sequence[nn.Module], optimizer: Any, scheduler: Any = None
) -> list[str]:
    """Load weights, buffers, moments and schedule; returns what could not be loaded and is not needed for a replay.

    Raises `UsageError` that names what does not fit.
    """
    state, notes = incident.state, list[str]()
    if "models" not in state:
        raise UsageError(
            f"the incident {incident.folder} has no weights: they exceeded its size limit. It cannot be replayed"
        )
    _check(models, state["models"])
    load_models(models, state["models"])
    _load_buffers(models, state.get("buffers", []))
    if optimizer is not None and "optimizer" in state:
        try:
            load_optimizer(optimizer, state["optimizer"])
        except Exception as error:  # forward and backward do without
            notes.append(f"the optimizer's state was not loaded: {error}")
    if scheduler is not None and state.get("scheduler") is not None:
        try:
            scheduler.load_state_dict(state["scheduler"])
        except Exception as error:
            notes.append(f"the schedule's state was not loaded: {error}")
    return notes


def fits(models: Sequence[nn.Module], saved: Sequence[Mapping[str, object]]) -> bool:
    """Whether the captured weights belong to these models, by name and shape."""
    return len(models) == len(saved) and not any(
        _differences(model, state) for model, state in zip(models, saved, strict=True)
    )


def _check(models: Sequence[nn.Module], saved: Sequence[Mapping[str, object]]) -> None:
    if len(models) != len(saved):
        raise UsageError(f"the incident has {len(saved)} models, and {len(models)} were built here")
    found = [each for model, state in zip(models, saved, strict=True) for each in _differences(model, state)]
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise UsageError(f"the model built here is not the captured one: {'; '.join(found[:_MOST_NAMED])}{more}")


def _differences(model: nn.Module, saved: Mapping[str, object]) -> list[str]:
    now = model.state_dict()
    found = [f"it has no {name!r}" for name in saved if name not in now]
    found += [f"the captured one has no {name!r}" for name in now if name not in saved]
    for name, value in now.items():
        other = saved.get(name)
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            shape = tuple(local_part(value).shape)
            if shape != tuple(other.shape):
                found.append(f"{name!r} is {shape} here and was {tuple(other.shape)}")
    return found


def _load_buffers(models: Sequence[nn.Module], saved: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Buffers that are not in a `state_dict`, if their shapes are unchanged."""
    for model, buffers in zip(models, saved, strict=False):
        live = dict(model.named_buffers())
        for name, value in buffers.items():
            target = live.get(name)
            if target is not None and target.shape == value.shape and not target.is_inference():
                write(target, value)


def set_modes(models: Sequence[nn.Module], modes: Sequence[ModelModes]) -> None:
    """Training mode and frozen parameters as captured, for a model that has not been set up."""
    for model, mode in zip(models, modes, strict=False):
        evaluating, frozen = set(mode["eval"]), set(mode["frozen"])
        for name, module in model.named_modules():
            module.training = name not in evaluating
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(name not in frozen)
