"""Observes the gradient scaler: its scale, the steps it skips, and gradients that are used while still scaled.

The loss before scaling is remembered, so that the curve shows the script's loss. A step counts as skipped if the
optimizer has not stepped after it, or if the scaler told a fused optimizer to skip it in its kernel. Nothing waits for
the device (see `loss_scale`). Scalers of other libraries are not covered.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher


def wrap_scaler(watcher: Watcher, wrapping: Hooks) -> None:
    """Observe the relevant calls of a gradient scaler."""
    calls = _ScalerCalls(watcher)
    wrapping.after(GradScaler, "scale", "scaler", calls.scaled, "the loss before scaling, and the scale")
    why = "whether gradients are still scaled when they are clipped"
    wrapping.after(GradScaler, "unscale_", "scaler", calls.unscaled, why)
    wrapping.add(GradScaler, "step", "scaler", "which steps are skipped", calls.before_step, calls.after_step)
    wrapping.after(GradScaler, "update", "scaler", calls.updated, "how the scale changes")


class _ScalerCalls:
    """Records each call of a gradient scaler."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._state, self._scale = watcher, watcher.state.scaler, watcher.loss_scale

    def scaled(self, result: Any, args: Any, kwargs: Any) -> None:
        scaler, given = args[0], args[1] if len(args) > 1 else kwargs.get("outputs")
        if not scaler.is_enabled():
            return
        self._state.enabled = True
        self._state.scaled_now = True
        if isinstance(result, Tensor) and isinstance(given, Tensor):
            self._watcher.backward.loss_scaled(weakref.ref(result), given.detach())
            self._scale.scaled(getattr(scaler, "_scale", None), getattr(scaler, "_init_scale", None))

    def unscaled(self, result: Any, args: Any, kwargs: Any) -> None:
        self._state.scaled_now = False
        self._state.unscale_by = None

    def before_step(self, args: Any, kwargs: Any) -> Any:
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        if not isinstance(optimizer, Optimizer) or not self._watcher.probes.here():
            return None
        known = self._watcher.probes.safely("scaler", self._steps_of, optimizer)
        return None if known is None else (optimizer, known, args[0])

    def after_step(self, token: Any, result: Any) -> None:
        self._watcher.probes.safely("scaler", self._stepped, *token)

    def _steps_of(self, optimizer: Optimizer) -> int:
        return self._watcher.steps.record_of(optimizer).series.count

    def _stepped(self, optimizer: Optimizer, known: int, scaler: GradScaler) -> None:
        state, sampled = self._state, self._watcher.state.sampled
        state.attempts += 1
        if self._steps_of(optimizer) != known:
            self._scale.stepped_with(_found_inf(scaler, optimizer))
            return
        self._scale.skipped()
        self._watcher.steps.skipped_by_scaler()
        if sampled is not None and len(sampled.backward_calls) > 8:
            self._watcher.sampler.restart()

    def updated(self, result: Any, args: Any, kwargs: Any) -> None:
        scaler = args[0]
        self._state.scaled_now = False
        if scaler.is_enabled():
            self._scale.updated(getattr(scaler, "_scale", None))


def _found_inf(scaler: GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """The tensors that make a fused optimizer skip an overflow, one for each device; empty for other optimizers."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not scaler.is_enabled():
        return []
    states = getattr(scaler, "_per_optimizer_states", {})
    found = states.get(id(optimizer), {}).get("found_inf_per_device", {})
    return [each for each in found.values() if isinstance(each, Tensor)]
