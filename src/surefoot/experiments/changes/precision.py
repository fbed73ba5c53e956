"""Number formats: float32 instead of fp16 and bf16, or bf16 instead of fp16; and deterministic kernels.

Autocast regions are entered with another format or not at all, casts and factories that ask for the format get the
other one, and gradient scalers are disabled (neither format needs one). Not covered: formats chosen inside compiled or
scripted code, and tensors that are loaded from a file in half precision. If weights still have the old format at the
first step, the run records a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from surefoot.experiments.changes.experiment import Experiment


_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "as_tensor", "rand", "randn", "arange", "linspace", "eye")
_CASTS = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float"}
_TYPE_WORDS = {"torch.HalfTensor": torch.float16, "torch.BFloat16Tensor": torch.bfloat16}


def use_fp32(experiment: Experiment) -> None:
    """Use float32 everywhere."""
    _replace(experiment, (torch.float16, torch.bfloat16), torch.float32)


def use_bf16(experiment: Experiment) -> None:
    """Use bf16 wherever the script uses fp16."""
    _replace(experiment, (torch.float16,), torch.bfloat16)


def _replace(experiment: Experiment, old: tuple[torch.dtype, ...], new: torch.dtype) -> None:
    experiment.patience = 5

    def entering(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        region = args[0]
        if region._enabled and region.fast_dtype in old:
            experiment.acted += 1
            region.fast_dtype = new
            if new is torch.float32:
                region._enabled = False

    def other(value: Any) -> Any:
        named = _TYPE_WORDS.get(value) if isinstance(value, str) else value
        if isinstance(named, torch.dtype) and named in old:
            experiment.acted += 1
            return new
        return value

    def casting(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return tuple(other(a) for a in args), {key: other(value) for key, value in kwargs.items()}

    experiment.alter(autocast, "__enter__", entering)
    for owner in (Tensor, nn.Module):
        experiment.alter(owner, "to", casting)
        experiment.alter(owner, "type", casting)
        for dtype in old:
            _redirect(experiment, owner, _CASTS[dtype], _CASTS[new])
    for name in _FACTORIES:
        experiment.alter(torch, name, casting)
    experiment.alter(torch, "set_default_dtype", casting)
    experiment.alter(GradScaler, "__init__", _without_scaling)
    experiment.before_step(_left_over(experiment, old))


def _redirect(experiment: Experiment, owner: Any, name: str, instead: str) -> None:
    """Make `model.half()` do what `model.float()` does."""
    target = getattr(owner, instead)

    def call(original: Any, args: Any, kwargs: Any) -> Any:
        experiment.acted += 1
        return target(*args, **kwargs)

    experiment.wrapping.around(owner, name, call)


def _without_scaling(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    # GradScaler(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled); the first is `self`.
    return args[:6], {**kwargs, "enabled": False}


def _left_over(experiment: Experiment, old: tuple[torch.dtype, ...]) -> Any:
    def before(optimizer: Optimizer) -> None:
        if experiment.watcher.state.steps:
            return
        left = {t.dtype for group in optimizer.param_groups for t in group["params"]} & set(old)
        if left:
            text = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in left))
            experiment.notes.append(f"some weights are still {text}")

    return before


def use_deterministic_kernels(experiment: Experiment) -> None:
    """Use deterministic kernels for the whole run. Operations that have none only warn, and memory is not filled."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    experiment.acted += 1
