"""`prepare` for your own loop with Accelerate.

    model, optimizer, loader = sf.trainers.accelerate.prepare(accelerator, model, optimizer, loader, log="runs/exp1")

replaces `accelerator.prepare`, and returns the same. The guard is attached to the optimizer. It gets the loss from
`accelerator.backward`, the mean over the microbatches of a step, and does the clipping of
`accelerator.clip_grad_norm_`. `save_state` and `load_state` include its state, and its numbers are logged with
`accelerator.log`. It ends with `accelerator.end_training()`, or with the program.
"""

from __future__ import annotations

import atexit
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim.optimizer import Optimizer

from surefoot.core.weak_reference import InertWhenCopied
from surefoot.errors import UsageError
from surefoot.trainers.accelerator_methods import engine_of, follow_clipping, follow_losses
from surefoot.trainers.guarded_training import GuardedTraining, GuardOptions, load_from, require_guard, save_into
from surefoot.trainers.watched_engine import WatchedEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from surefoot.record.log import RunLog

_TRAININGS: weakref.WeakKeyDictionary[Any, GuardedTraining | WatchedEngine] = weakref.WeakKeyDictionary()

LOSS_FROM = "Call `accelerator.backward(loss)` instead of `loss.backward()`."


def prepare(
    accelerator: Any,
    *things: Any,
    log: str | PathLike[str] | RunLog | None = None,
    device_placement: list[bool] | None = None,
    **options: Any,
) -> Any:
    """Prepare models, optimizers, loaders and schedulers with Accelerate, and guard the optimizers.

    Args:
        accelerator: an `accelerate.Accelerator`.
        things: the arguments of `accelerator.prepare`, including a model and an optimizer.
        log: the run folder, or a `RunLog`.
        device_placement: as in `accelerator.prepare`.
        options: the fields of `GuardOptions`, as `clip`, `checker`, `escalation`, `recovery` or `mode`.
    """
    settings = GuardOptions.of(log, options)
    before = _TRAININGS.get(accelerator)
    if isinstance(before, GuardedTraining) and before.is_attached:
        raise UsageError(
            "this accelerator is already guarded. Pass all models and optimizers in one call of `prepare`, or call "
            "`sf.trainers.accelerate.end(accelerator)` first."
        )
    end(accelerator)
    prepared = accelerator.prepare(*things, device_placement=device_placement)
    found = prepared if isinstance(prepared, tuple) else (prepared,)
    engine = engine_of(accelerator)
    if engine is not None:
        _keep(accelerator, _watched(accelerator, found, WatchedEngine(settings, engine)))
        return prepared
    models = [thing for thing in found if isinstance(thing, nn.Module)]
    optimizers = [thing for thing in found if isinstance(thing, Optimizer)]
    if not models or not optimizers:
        raise UsageError(
            f"`prepare` guards an optimizer and its model; got {len(models)} models and {len(optimizers)} optimizers. "
            "Pass both in one call."
        )
    training = GuardedTraining(settings, models, [_inner(each) for each in optimizers], "the loop", LOSS_FROM)
    require_guard(training)
    follow_losses(training, accelerator, is_share=False)
    follow_clipping(training, accelerator)
    guarded = {id(attachment.optimizer): number for number, attachment in enumerate(training.attachments)}
    for optimizer in optimizers:
        scaler, number = getattr(optimizer, "scaler", None), guarded.get(id(_inner(optimizer)))
        if scaler is not None and number is not None:  # it skips steps without calling the optimizer
            _after_steps(training, optimizer, partial(training.count_if_skipped, scaler, number))
    _follow_the_rest(training, accelerator)
    _keep_in_checkpoints(training, accelerator)
    _keep(accelerator, training)
    return prepared


def _watched(accelerator: Any, prepared: tuple[Any, ...], watched: WatchedEngine) -> WatchedEngine:
    follow_losses(watched, accelerator, is_share=False)
    for optimizer in prepared:
        if isinstance(optimizer, AcceleratedOptimizer):
            _after_steps(watched, optimizer, watched.stepped)
    return watched


def _keep(accelerator: Any, training: GuardedTraining | WatchedEngine) -> None:
    """Remember the guard of an accelerator, which ends with it at the latest."""
    _TRAININGS[accelerator] = training
    weakref.finalize(accelerator, training.finish).atexit = False


def training_of(accelerator: Any) -> GuardedTraining:
    """The guard of an accelerator that went through `prepare`."""
    found = _TRAININGS.get(accelerator)
    if not isinstance(found, GuardedTraining):
        raise UsageError("nothing is guarded here: call `prepare(accelerator, model, optimizer, ...)` first.")
    return found


def end(accelerator: Any) -> None:
    """End the guard: detach it, write the log, and report the diagnosis. Automatic at the end of the program."""
    found = _TRAININGS.pop(accelerator, None)
    if found is not None:
        found.finish()


def _inner(optimizer: Any) -> Any:
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _after_steps(training: GuardedTraining | WatchedEngine, optimizer: Any, call: Callable[[], None]) -> None:
    """Call a function after each step of one of Accelerate's optimizers that ends an accumulation."""
    state = optimizer.gradient_state

    def followed(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        if state.sync_gradients:
            call()
        return result

    training.replaced.follow(optimizer, "step", followed)


def _follow_the_rest(training: GuardedTraining, accelerator: Any) -> None:
    """Add surefoot's numbers to those for the trackers, and end with `accelerator.end_training()`."""
    reference = weakref.ref(accelerator)

    def followed_log(own: Callable[..., Any], values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return own(values | training.numbers(), *args, **kwargs)

    def followed_end(own: Callable[..., Any]) -> Any:
        end(reference())
        return own()

    training.replaced.follow(accelerator, "log", followed_log)
    training.replaced.follow(accelerator, "end_training", followed_end)


class _Hook(InertWhenCopied):
    """A hook of an accelerator."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)


def _keep_in_checkpoints(training: GuardedTraining, accelerator: Any) -> None:
    """Save the state of the guard with the accelerator's, and load it when model and optimizer have been loaded.

    It is not a custom object of the accelerator, because its checkpoints could then not be loaded without the guard.
    """
    folders: list[Path] = []

    def save(models: Any, weights: Any, folder: str) -> None:
        if training.is_attached:
            save_into(training, Path(folder))

    def load_state(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        folders.clear()
        result = own(*args, **kwargs)
        for folder in folders:
            if training.is_attached:
                load_from(training, folder)
        return result

    training.hooks += [
        accelerator.register_save_state_pre_hook(_Hook(save)),
        accelerator.register_load_state_pre_hook(_Hook(lambda models, folder: folders.append(Path(folder)))),
    ]
    training.replaced.follow(accelerator, "load_state", load_state)


@atexit.register
def _end_all() -> None:
    for accelerator in list(_TRAININGS):
        end(accelerator)
