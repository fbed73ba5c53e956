"""Checkpoints: what is loaded into models, optimizers and schedules, what is saved, and what the files hold.

Only the kinds of state in a file are noted, by their keys; no value is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from surefoot.core.function_hooks import Hook, hear
from surefoot.keep.restore import load_models
from surefoot.watch.user_frames import caller, is_library, is_users, site

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher


def wrap_states(watcher: Watcher, wrapping: Hooks) -> None:
    """Loading and saving."""

    def module_loaded(result: Any, args: Any, kwargs: Any) -> None:
        frame = caller()
        if frame is None or not (is_users(frame.f_code.co_filename) or is_library(frame.f_code.co_filename)):
            return
        for tensor in args[0].parameters():
            watcher.book.add(tensor).loaded = True
        if is_users(frame.f_code.co_filename):
            watcher.happened({"event": "model-loaded", "step": watcher.steps, "site": site(4)})

    def models_restored(call: Any, _: Any) -> None:
        if watcher.here():
            watcher.safely("states", restored, call[0][0])

    def restored(models: Any) -> None:
        for model in models:
            for tensor in model.parameters():
                watcher.book.add(tensor).loaded = True
        watcher.happened({"event": "model-loaded", "step": watcher.steps, "site": site(4)})

    def optimizer_loaded(result: Any, args: Any, kwargs: Any) -> None:
        held = watcher.watched(args[0])
        held.loaded_at = held.series.count
        watcher.look_soon()
        ages = [float(state["step"]) for state in args[0].state.values() if "step" in state]
        held.loaded_age = max(ages) if ages else None
        watcher.happened(
            {"event": "optimizer-loaded", "step": watcher.steps, "site": site(4), "optimizer": held.number}
        )

    def scheduler_loaded(result: Any, args: Any, kwargs: Any) -> None:
        watcher.happened({"event": "scheduler-loaded", "step": watcher.steps, "site": site(4)})

    def file_loaded(result: Any, args: Any, kwargs: Any) -> None:
        watcher.happened(
            {"event": "file-loaded", "step": watcher.steps, "site": site(4), "holds": _states_in(result)}
            | {"backward": watcher.backwards}
        )

    def file_saved(result: Any, args: Any, kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("obj")
        watcher.happened({"event": "saved", "step": watcher.steps, "site": site(4), "holds": _states_in(given)})

    def before_swap(args: Any, kwargs: Any) -> Any:
        tensors = tuple(each for each in args if isinstance(each, Tensor))
        return watcher.safely("states", watcher.before_swap, tensors) if watcher.here() else None

    def after_swap(swapped: Any) -> None:
        watcher.safely("states", swapped)

    wrapping.listen(
        torch.utils,
        "swap_tensors",
        "states",
        "torch swaps no tensor that is referred to weakly: our references are dropped meanwhile",
        before_swap,
        last=after_swap,
    )
    why = "a checkpoint is resumed: which states are loaded"
    wrapping.after(nn.Module, "load_state_dict", "states", module_loaded, why)
    # A stabilizer's resume: sharded weights do not go through `load_state_dict`. Ours, so not in the table.
    watcher.safely("states", hear, load_models, Hook(lambda args, kwargs: (args, kwargs), models_restored))
    wrapping.after(Optimizer, "load_state_dict", "states", optimizer_loaded, why)
    wrapping.after(LRScheduler, "load_state_dict", "states", scheduler_loaded, why)
    wrapping.after(torch.serialization, "load", "states", file_loaded, "which states a checkpoint holds")
    wrapping.after(torch.serialization, "save", "states", file_saved, "which states a checkpoint holds")


def _states_in(value: Any) -> list[str]:
    """What kinds of state a checkpoint holds."""
    found = []
    values = value if isinstance(value, dict) else {}
    for item in [value, *list(values.values())[:64]]:
        if not isinstance(item, dict):
            continue
        if set(item) >= {"state", "param_groups"}:
            found.append("optimizer")
        elif "last_epoch" in item or "_step_count" in item:
            found.append("scheduler")
        elif "growth_factor" in item or ("scale" in item and "_growth_tracker" in item):
            found.append("scaler")
        elif item and all(isinstance(part, Tensor) for part in item.values()):
            found.append("model")
    counts = {"epoch", "step", "iteration", "iter", "global_step", "start_epoch", "steps", "epochs"}
    if any(str(key).lower() in counts and isinstance(item, int) for key, item in values.items()):
        found.append("progress")
    return found
