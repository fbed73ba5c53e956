"""Checks settings at construction, before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from surefoot.act.loss_scale import DynamicLossScaler, TorchLossScaler
from surefoot.decide.unguardable import check_hooks, check_optimizer
from surefoot.errors import SettingError, require
from surefoot.observe.parameters import Layout
from surefoot.types import Clipper, LossScaler, Shaper

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]


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
        isinstance(accumulate, int) and accumulate >= 1,
        f"`accumulate` must be at least 1, the microbatches per optimizer step; got {accumulate!r}.",
    )
    require(
        decide_on in ("auto", "host", "device"),
        f"`decide_on` must be 'auto', 'host' or 'device'; got {decide_on!r}.",
    )
    for name, (part, kind) in parts.items():
        require(part is None or isinstance(part, kind), f"`{name}` must be a {kind.__name__}; got {part!r}.")
    check_optimizer(optimizer, any(parts.get(name, (None,))[0] is not None for name in ("checkpoints", "recovery")))
    check_hooks([model for model in models if isinstance(model, nn.Module)])
    require(isinstance(lag_steps, int) and lag_steps >= 0, f"`lag_steps` must not be negative; got {lag_steps!r}.")
    if scheduler is not None:
        require(hasattr(scheduler, "step"), f"`scheduler` has no `step`; got {_kind(scheduler)}.")
        require(
            not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau),
            "`ReduceLROnPlateau` needs a metric at each step: call `scheduler.step(metric)` yourself after evaluation.",
        )
        require(
            getattr(scheduler, "optimizer", optimizer) is optimizer,
            "the scheduler was created for another optimizer; create it for the optimizer that you pass here.",
        )


def layout_of(models: Sequence[nn.Module], optimizer: Any) -> Layout:
    """The optimizer's parameters, some of which must be the model's."""
    layout = Layout(models, optimizer)
    require(
        layout.known > 0,
        f"the optimizer's {len(layout.parameters)} parameters do not belong to the model, so it would not be trained. "
        "Create the optimizer from `model.parameters()`.",
    )
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
