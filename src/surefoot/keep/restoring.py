"""Put saved states into models and optimizers, exactly, or change nothing and say what does not fit.

torch's own `load_state_dict` stops half-way at the first tensor that does not fit, and casts optimizer state to the
dtype of its parameter. Here everything is compared first, and what was saved comes back as it was. Of a sharded
parameter (DTensor) the saved shard goes into the shard that lies here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.errors import CheckpointError
from surefoot.keep.checkpoint.tree import local_part
from surefoot.keep.staging import map_tensors, sharded_like

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


def check_fits(models: Sequence[nn.Module], optimizer: Any, tree: dict[str, Any]) -> None:
    """Raise `CheckpointError` that names what does not fit, before anything is changed."""
    missing = [
        part
        for part in ("models", "optimizer", "scheduler", "also", "stabilizer", "streams", "data")
        if part not in tree
    ]
    _refuse([f"it has no part {part!r}" for part in missing])
    if len(models) != len(tree["models"]):
        _refuse([f"it holds {len(tree['models'])} models, and the run has {len(models)}"])
    faults = []
    for model, saved in zip(models, tree["models"], strict=True):
        faults += _differences(model.state_dict(), saved)
    groups, saved_groups = optimizer.param_groups, tree["optimizer"]["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        faults.append(f"its optimizer has {saved_sizes} parameters per group, and the run's has {sizes}")
    # What torch adds to a group by itself, and what schedules note there, says nothing about the kind.
    expected = {key for group in groups for key in group} - {"params", "initial_lr", "max_lr", "min_lr", "param_names"}
    lacking = sorted(expected - {key for group in saved_groups for key in group})
    if groups and saved_groups and lacking:
        faults.append(f"its optimizer is of another kind: it has no {', '.join(map(repr, lacking[:4]))}")
    _refuse(faults)


def _differences(now: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    faults = [f"it has no {name!r}" for name in now if name not in saved]
    faults += [f"the model has no {name!r}" for name in saved if name not in now]
    for name, value in now.items():
        other = saved.get(name)
        if isinstance(value, Tensor) and isinstance(other, Tensor) and local_part(value).shape != other.shape:
            shapes = f"{tuple(other.shape)}, and the model's {tuple(local_part(value).shape)}"
            faults.append(f"its {name!r} has shape {shapes}")
    return faults


def _refuse(faults: list[str]) -> None:
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(
            f"the checkpoint does not fit this run: {'; '.join(faults[:5])}{more}. Build model and optimizer as they "
            "were when it was saved, or start in another folder."
        )


@torch.no_grad()
def load_models(models: Sequence[nn.Module], states: Sequence[dict[str, Any]]) -> None:
    """Load every model, shards into shards."""
    for model, state in zip(models, states, strict=True):
        now = model.state_dict()
        if not any(hasattr(value, "to_local") for value in now.values()):
            model.load_state_dict(state)
            continue
        for name, value in now.items():
            local_part(value).copy_(state[name])


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Load hyper-parameters and moments."""
    sharded = any(hasattr(p, "to_local") for group in optimizer.param_groups for p in group["params"])
    if not sharded:
        optimizer.load_state_dict(state)
    else:
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
    load_moments(optimizer, state)


@torch.no_grad()
def load_moments(optimizer: Any, state: dict[str, Any]) -> None:
    """Load what the optimizer has gathered per parameter, in the dtype it was saved in; learning rates stay."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        saved = state["state"].get(number)
        if saved is None:
            optimizer.state.pop(parameter, None)
            continue
        now = optimizer.state[parameter]
        for key in set(now) - set(saved):
            del now[key]
        for key, value in saved.items():
            now[key] = _placed(value, now.get(key), parameter)


def _placed(saved: Any, now: Any, parameter: Tensor) -> Any:
    """A saved value where the optimizer expects it."""
    if not isinstance(saved, Tensor):
        return map_tensors(saved, lambda tensor: tensor.to(local_part(parameter).device, copy=True))
    if isinstance(now, Tensor) and local_part(now).shape == saved.shape and now.dtype == saved.dtype:
        local_part(now).copy_(saved)
        return now
    # Adam's step count lives on the host unless its kernel is fused or capturable: where torch has put it, it stays.
    device = now.device if isinstance(now, Tensor) else local_part(parameter).device if saved.ndim else saved.device
    return sharded_like(parameter, saved.to(device, copy=True))


def as_gradient(saved: Tensor, parameter: Tensor) -> Tensor:
    """A saved gradient where its parameter is."""
    gradient = saved.to(local_part(parameter).device, copy=True)
    return sharded_like(parameter, gradient)
