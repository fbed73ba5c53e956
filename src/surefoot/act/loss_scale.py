"""Loss scaling for fp16: keep small gradients above zero, back off when they overflow.

The scale and its counters are device tensors; nothing here reads them. Overflow is determined from the gradients,
before the step, and the step is skipped. A loss that is itself NaN or Inf would not be cured by a smaller scale, so it
does not lower the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from surefoot.core.settings import check_types
from surefoot.errors import require


class LossScaleState(NamedTuple):
    """The scale, the clean steps since its last change or overflow, and the overflows left before it is reduced."""

    scale: Tensor
    clean: Tensor
    patience: Tensor


@dataclass(frozen=True)
class DynamicLossScaler:
    """Double the scale after a full window of clean steps, halve it on overflow.

    `TrainingStabilizer(..., precision="fp16")` uses it. In your own loop, scale the loss, divide the gradients,
    and skip the step when one of them is not finite:

    >>> scaler = DynamicLossScaler(initial_scale=1024.0)
    >>> state = scaler.init()
    >>> parameter = torch.nn.Parameter(torch.ones(2))
    >>> (parameter.sum() * scaler.scale_of(state)).backward()
    >>> parameter.grad /= scaler.scale_of(state)
    >>> overflow = not parameter.grad.isfinite().all()
    >>> state = scaler.update(state, overflow)
    >>> parameter.grad, float(scaler.scale_of(state))
    (tensor([1., 1.]), 1024.0)
    """

    initial_scale: float = 2.0**16
    """The scale of the first step."""
    growth_factor: float = 2.0
    """The factor when the scale grows."""
    backoff_factor: float = 0.5
    """The factor when gradients overflow."""
    growth_interval: int = 2_000
    """The number of consecutive clean steps before the scale grows."""
    hysteresis: int = 1
    """The number of overflows tolerated before the scale is reduced; restored when it grows."""
    floor: float = 1.0
    """The smallest scale."""
    ceiling: float = 2.0**24
    """The largest scale."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.growth_factor > 1, f"`growth_factor` must be above 1; got {self.growth_factor}.")
        require(0 < self.backoff_factor < 1, f"`backoff_factor` must lie in (0, 1); got {self.backoff_factor}.")
        require(self.growth_interval >= 1, f"`growth_interval` must be at least 1; got {self.growth_interval}.")
        require(self.hysteresis >= 1, f"`hysteresis` must be at least 1; got {self.hysteresis}.")
        require(
            0 < self.floor <= self.initial_scale <= self.ceiling,
            f"`initial_scale` must lie between `floor` and `ceiling`; "
            f"got {self.floor} <= {self.initial_scale} <= {self.ceiling}.",
        )

    def init(self) -> LossScaleState:
        """The initial scale."""
        return LossScaleState(
            torch.full((), self.initial_scale), torch.zeros(()), torch.full((), float(self.hysteresis))
        )

    def scale_of(self, state: LossScaleState) -> Tensor:
        """The factor for the loss."""
        return state.scale

    def update(self, state: LossScaleState, overflow: Tensor | bool) -> LossScaleState:
        """Reduce or grow the scale, after a step whose gradients did or did not overflow."""
        overflow = torch.as_tensor(overflow)
        scale, clean, patience = (part.to(overflow.device) for part in state)
        patience = torch.where(overflow, (patience - 1).clamp(min=0), patience)
        clean = torch.where(overflow, 0, clean + 1)
        back_off = overflow & (patience <= 0)
        grow = clean >= self.growth_interval
        scale = torch.where(back_off, (scale * self.backoff_factor).clamp(min=self.floor), scale)
        scale = torch.where(grow, (scale * self.growth_factor).clamp(max=self.ceiling), scale)
        return LossScaleState(scale, torch.where(grow, 0, clean), torch.where(grow, float(self.hysteresis), patience))


class GradScalerState(TypedDict, total=False):
    """The `state_dict()` of a `torch.amp.GradScaler`, or only its two tensors."""

    scale: Tensor | float | None
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: Tensor | int | None


@dataclass(frozen=True)
class TorchLossScaler:
    """Updates a `torch.amp.GradScaler` of the user, who may still read and save it."""

    scaler: torch.amp.GradScaler
    device: torch.device
    floor: float = 0.0

    def __post_init__(self) -> None:
        require(self.scaler.is_enabled(), "the GradScaler is disabled (`enabled=False`); pass no scaler instead.")
        if self.scaler._scale is None:
            self.scaler._lazy_init_scale_growth_tracker(self.device)

    def init(self) -> tuple[()]:
        """No state: it is in the GradScaler."""
        return ()

    def scale_of(self, state: tuple[()]) -> Tensor:
        """The GradScaler's own scale."""
        scale = self.scaler._scale
        assert scale is not None
        return scale

    def update(self, state: tuple[()], overflow: Tensor) -> tuple[()]:
        """The same as `GradScaler.update`, with surefoot's overflow flag."""
        growth_tracker = self.scaler._growth_tracker
        assert growth_tracker is not None
        torch._amp_update_scale_(
            self.scale_of(state),
            growth_tracker,
            overflow.to(torch.float32),
            self.scaler.get_growth_factor(),
            self.scaler.get_backoff_factor(),
            self.scaler.get_growth_interval(),
        )
        return state

    def state(self, live: bool) -> GradScalerState:
        """The GradScaler's own state; with `live`, its two tensors are not read from the device."""
        state: GradScalerState = self.scaler.state_dict() if not live else {}  # type: ignore[assignment]
        return state or {"scale": self.scaler._scale, "_growth_tracker": self.scaler._growth_tracker}

    def load(self, state: GradScalerState) -> None:
        """Continue from a state of either kind."""
        scale, growth_tracker = state["scale"], state["_growth_tracker"]
        assert scale is not None
        assert growth_tracker is not None
        now = {"scale": float(scale), "_growth_tracker": int(growth_tracker)}
        self.scaler.load_state_dict(self.scaler.state_dict() | state | now)
