"""Checks settings at construction, before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from surefoot.act.loss_scale import DynamicLossScaler, TorchLossScaler
from surefoot.core.settings import is_whole, shown
from surefoot.decide.unguardable import check_hooks, check_optimizer
from surefoot.errors import SettingError, UsageError, require
from surefoot.observe.parameters import Layout
from surefoot.types import Clipper, LossScaler, Scalar, Shaper

if TYPE_CHECKING:
    from collections.abc import Sequence

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]


def models_of(model: Any) -> list[Any]:
    """The given model, or models, as a list."""
    if isinstance(model, nn.Module):
        return [model]
    require(
        isinstance(model, Iterable) and not isinstance(model, (str, type)),
        f"`model` must be a torch.nn.Module or several; got {shown(model)}.",
    )
    return list(model)


_WORDS: dict[type, str] = {Mapping: "a dictionary of objects by name", bool: "True or False"}


def check_kinds(parts: Mapping[str, tuple[object, type]]) -> None:
    """Raise `SettingError` for a part that is neither `None` nor of its class; name, part and class are given."""
    for name, (part, kind) in parts.items():
        words = _WORDS.get(kind, f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}")
        require(part is None or isinstance(part, kind), f"`{name}` must be {words}; got {shown(part)}.")


def signal_value(name: str, value: object) -> Scalar:
    """A user's own signal: a float, or a 0-d tensor that is not read."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        kind = "complex tensor" if value.is_complex() else "tensor"
        raise UsageError(f"signal {name!r} must be one number; got a {kind} of shape {tuple(value.shape)}.")
    if not isinstance(value, (Tensor, Real)):
        raise UsageError(f"signal {name!r} must be one number; got {shown(value)}.")
    return value.detach().reshape(()) if isinstance(value, Tensor) else float(value)


def check_settings(
    models: Sequence[object],
    optimizer: Any,
    scheduler: Any,
    precision: object,
    scaler: object,
    accumulate: int,
    lag_steps: int,
    decide_on: object,
    parts: Mapping[str, tuple[object, type]],
) -> None:
    """Raise `SettingError` for settings that cannot work, or cannot work together."""
    for model in models:
        require(isinstance(model, nn.Module), f"`model` must be a torch.nn.Module or several; got {_kind(model)}.")
    for needed in ("step", "zero_grad", "param_groups"):
        require(hasattr(optimizer, needed), f"`optimizer` has no `{needed}`; got {_kind(optimizer)}, not an optimizer.")
    require(
        precision in (None, "fp32", "bf16", "fp16"),
        f"`precision` must be 'fp32', 'bf16', 'fp16' or None for an autocast of your own; got {precision!r}.",
    )
    require(
        scaler is None or precision in (None, "fp16"),
        f"`scaler` is for fp16; got precision={precision!r}. {precision} has the range of fp32 and needs no loss "
        "scaling: remove the scaler.",
    )
    require(
        is_whole(accumulate) and accumulate >= 1,
        f"`accumulate` must be at least 1, the microbatches per optimizer step; got {accumulate!r}.",
    )
    require(
        decide_on in ("auto", "host", "device"),
        f"`decide_on` must be 'auto', 'host' or 'device'; got {decide_on!r}.",
    )
    check_kinds(parts)
    check_optimizer(optimizer, any(parts.get(name, (None,))[0] is not None for name in ("checkpoints", "recovery")))
    check_hooks([model for model in models if isinstance(model, nn.Module)])
    check_lag(lag_steps)
    if scheduler is not None:
        _check_scheduler(scheduler, optimizer)


def _check_scheduler(scheduler: Any, optimizer: Any) -> None:
    require(hasattr(scheduler, "step"), f"`scheduler` has no `step`; got {_kind(scheduler)}.")
    require(
        not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau),
        "`ReduceLROnPlateau` needs a metric at each step: call `scheduler.step(metric)` yourself after evaluation.",
    )
    require(
        getattr(scheduler, "optimizer", optimizer) is optimizer,
        "the scheduler was created for another optimizer; create it for the optimizer that you pass here.",
    )


def check_lag(lag_steps: object) -> None:
    """Raise `SettingError` unless `lag_steps` is a number of steps."""
    require(is_whole(lag_steps), f"`lag_steps` must be a whole number; got {shown(lag_steps)}.")
    require(lag_steps >= 0, f"`lag_steps` must not be negative; got {lag_steps}.")  # type: ignore[operator]


def check_values(layout: Layout) -> None:
    """Raise `SettingError` for a parameter that has no values yet: of a lazy module, or on the meta device."""
    for name, parameter in layout.parameters:
        require(
            not is_lazy(parameter),
            f"parameter {name!r} is not initialised yet, because its module is lazy. Run one forward pass before this.",
        )
        require(
            parameter.device.type != "meta",
            f"parameter {name!r} is on the meta device and has no values. Create the model on a device, or call "
            "`model.to_empty(device=...)` and initialise it, before this.",
        )


def layout_of(models: Sequence[nn.Module], optimizer: Any) -> Layout:
    """The optimizer's parameters, some of which must be the model's."""
    layout = Layout(models, optimizer)
    require(
        layout.known > 0,
        f"the optimizer's {len(layout.parameters)} parameters do not belong to the model, so it would not be trained. "
        "Create the optimizer from `model.parameters()`.",
    )
    check_values(layout)
    return layout


def split_clip(clip: Any) -> tuple[tuple[Shaper, ...], Clipper | None]:
    """The shapers, and at most one clipper after them."""
    parts = () if clip is None else tuple(clip) if isinstance(clip, (tuple, list)) else (clip,)
    for part in parts:
        if isinstance(part, (int, float)):
            raise SettingError(f"`clip` takes a clipper; got the number {part}. Write `clip=ClipByNorm({part})`.")
        require(
            isinstance(part, (Clipper, Shaper)) and not isinstance(part, type),
            f"`clip` takes clippers such as ClipByNorm(1.0) and shapers such as CentralizeGradients(); got {part!r}.",
        )
    shapers = tuple(part for part in parts if isinstance(part, Shaper))
    clippers = tuple(part for part in parts if not isinstance(part, Shaper))
    require(len(clippers) <= 1, f"`clip` takes at most one clipper; got {len(clippers)}: {clippers}.")
    require(
        parts == shapers + clippers,
        f"shapers must come before the clipper; got {parts}.",
    )
    return shapers, clippers[0] if clippers else None


def as_scaler(scaler: Any, precision: Precision | None, device: torch.device) -> LossScaler | None:
    """The loss scaler to use: the given one, a `DynamicLossScaler` for fp16, or none."""
    if isinstance(scaler, torch.amp.GradScaler):
        return TorchLossScaler(scaler, device)
    if scaler is None:
        return DynamicLossScaler() if precision == "fp16" else None
    require(
        all(hasattr(scaler, name) for name in ("init", "update", "scale_of")),
        f"`scaler` must be a DynamicLossScaler or a torch.amp.GradScaler; got {scaler!r}.",
    )
    return scaler  # type: ignore[no-any-return]


def _kind(thing: object) -> str:
    return type(thing).__name__
