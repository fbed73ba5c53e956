"""The gradient scaler of mixed precision: its scale, the steps it skips, and gradients used while still scaled.

The loss is remembered as it was before scaling, so that the curve shows the script's loss. A skipped step is one after
which the optimizer has not stepped. Scalers of other libraries are left out.
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
    """Everything a gradient scaler is asked to do."""
    state = watcher.scaler

    def scaled(result: Any, args: Any, kwargs: Any) -> None:
        scaler, given = args[0], args[1] if len(args) > 1 else kwargs.get("outputs")
        if not scaler.is_enabled():
            return
        state["enabled"] = True
        state["scaled_now"] = True
        if isinstance(result, Tensor) and isinstance(given, Tensor):
            watcher.unscaled = (weakref.ref(result), given.detach())
            if isinstance(getattr(scaler, "_scale", None), Tensor):
                state["scale"] = state["unscale_by"] = float(scaler._scale)

    def unscaled(result: Any, args: Any, kwargs: Any) -> None:
        state["scaled_now"] = False
        state["unscale_by"] = None

    def before_step(args: Any, kwargs: Any) -> Any:
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        if not isinstance(optimizer, Optimizer) or not watcher.here():
            return None
        known = watcher.safely("scaler", steps_of, optimizer)
        return None if known is None else (optimizer, known)

    def after_step(token: Any, result: Any) -> None:
        watcher.safely("scaler", stepped, *token)

    def steps_of(optimizer: Optimizer) -> int:
        return watcher.watched(optimizer).series.count

    def stepped(optimizer: Optimizer, known: int) -> None:
        state["attempts"] = state.get("attempts", 0) + 1
        if watcher.watched(optimizer).series.count == known:
            state["skips"] = state.get("skips", 0) + 1
            state.setdefault("skip_steps", []).append(state["attempts"] - 1)
            del state["skip_steps"][:-500]
            watcher.step_skipped()
            if watcher.look is not None and len(watcher.look.roots) > 8:
                watcher.end_look()
                watcher.begin_look()

    def updated(result: Any, args: Any, kwargs: Any) -> None:
        scaler = args[0]
        state["scaled_now"] = False
        if scaler.is_enabled() and isinstance(getattr(scaler, "_scale", None), Tensor):
            trace = state.setdefault("trace", [])
            trace.append(float(scaler._scale))
            if len(trace) > 2000:
                del trace[500:1000]

    wrapping.after(GradScaler, "scale", "scaler", scaled, "the loss before scaling, and the scale")
    wrapping.after(GradScaler, "unscale_", "scaler", unscaled, "whether gradients still carry the scale when clipped")
    wrapping.listen(GradScaler, "step", "scaler", "which steps are skipped", before_step, after_step)
    wrapping.after(GradScaler, "update", "scaler", updated, "how the scale moves")
