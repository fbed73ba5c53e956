"""Observes optimizers: their construction, `zero_grad`, their steps, and their schedules.

Steps are observed through torch's own global step hooks, so that subclasses and fused optimizers are included. The
state of a schedule is read after each step; only its constructor is hooked.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from surefoot.watch.context import SchedulerRecord
from surefoot.watch.user_frames import site

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher


def wrap_optimizers(watcher: Watcher, wrapping: Hooks) -> None:
    """Observe optimizers and schedules from their construction on."""

    def made(_: Any, args: Any, kwargs: Any) -> None:
        watcher.steps.optimizer_made(args[0])

    wrapping.after(Optimizer, "__init__", "optimizers", made, "a new optimizer: its settings and parameters")

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_compiling():  # Dynamo compiles these hooks with the step, and evaluates this to a constant
            return
        if watcher.probes.here():
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            watcher.probes.safely("steps", watcher.steps.before, optimizer, callable(closure))
        if watcher.steps.guard.acts:
            watcher.steps.guard.protect(optimizer, watcher.steps.record_of)

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_compiling():
            return
        if watcher.probes.here():
            watcher.probes.safely("steps", watcher.steps.after, optimizer)
            if watcher.memory.is_due:
                watcher.probes.safely("memory", watcher.memory.after_step)

    wrapping.keep(register_optimizer_step_pre_hook(before_step).remove)
    wrapping.keep(register_optimizer_step_post_hook(after_step).remove)

    def zeroed(args: Any, kwargs: Any) -> Any:
        if not watcher.probes.here():  # only a number is recorded, without a call of torch that would need `safely`
            return None
        watcher.steps.gradients_zeroed()
        return None if watcher.state.sampled is None else watcher.state.set_recorder_aside()

    def take_up(recorder: Any) -> None:
        recorder.take_up()

    why = "whether gradients are zeroed, and whether this happens between backward and step"
    wrapping.add(Optimizer, "zero_grad", "zero_grad", why, zeroed, None, take_up)
    wrapping.add(nn.Module, "zero_grad", "zero_grad", why, zeroed, None, take_up)

    def scheduled(_: Any, args: Any, kwargs: Any) -> None:
        scheduler = args[0]
        watcher.calls.schedulers.append(SchedulerRecord(weakref.ref(scheduler), type(scheduler).__name__, site(4)))

    wrapping.after(LRScheduler, "__init__", "schedules", scheduled, "a new schedule")
    wrapping.after(ReduceLROnPlateau, "__init__", "schedules", scheduled, "a new schedule")
