"""The hooks that tell a `Stage` what the script does: one set for a loop with a stabilizer, one for a bare loop.

Run logs, checkpoints and incidents of the script's own are turned off, or sent to a folder that is thrown away.
Nothing is ever unwrapped: the process ends with the replay.
"""

from __future__ import annotations

import functools
import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from surefoot.diagnose.replay.stage import Actor, Stage
from surefoot.diagnose.replay.state import fits
from surefoot.lifeline import _Drawn
from surefoot.record.incidents.draws import listen
from surefoot.record.incidents.keeper import IncidentKeeper
from surefoot.record.incidents.notes import StepNotes
from surefoot.record.incidents.reading import number
from surefoot.record.log import RunLog
from surefoot.stabilizer import TrainingStabilizer
from surefoot.state import unpack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def install(stage: Stage, scratch: Path, **settings: Any) -> None:
    """Put the hooks in place, those for the kind of loop that was captured.

    `settings` take the place of those that the script gives to a stabilizer.
    """
    listen(stage)
    _wrap(_Drawn, "__next__", lambda original: lambda self: stage.loader_drew(original(self)))
    if stage.incident.facts["configuration"].get("loop") == "bare":
        _BareLoop(stage).install()
        made: Callable[[Any], None] = lambda stabilizer: None  # noqa: E731
    else:
        loop = _GuardedLoop(stage)
        loop.install()
        made = loop.made
    _quieten(scratch, made, settings)


def _quieten(scratch: Path, made: Callable[[Any], None], settings: dict[str, Any]) -> None:
    """Nothing that surefoot itself writes in this script goes where it would have gone."""

    def init(original: Any) -> Any:
        def made_quiet(self: Any, *args: Any, **kwargs: Any) -> None:
            quiet = {"log": None, "checkpoints": None, "incidents": IncidentKeeper(scratch)}
            original(self, *args, **{**kwargs, **quiet, **settings})
            self._capture.note_everything()
            made(self)

        return made_quiet

    def logged(original: Any) -> Any:
        return lambda self, folder, **settings: original(self, scratch / "log", **{**settings, "sinks": ()})

    _wrap(TrainingStabilizer, "__init__", init)
    _wrap(TrainingStabilizer, "restore", lambda _: lambda self, which="latest": None)
    _wrap(TrainingStabilizer, "save", lambda _: lambda self, metric=None: None)
    _wrap(RunLog, "__init__", logged)


class _GuardedLoop:
    """A loop with a stabilizer: it knows the models, and says when it steps."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._stabilizer: TrainingStabilizer | None = None

    def install(self) -> None:
        _wrap(TrainingStabilizer, "step", self._step)
        _wrap(TrainingStabilizer, "flush", self._flush)
        stage = self._stage

        def pieces(original: Any) -> Any:
            return lambda self, loss_fn, batch, *, weight=None: original(
                self, loss_fn, stage.feed(batch, "given"), weight=weight
            )

        _wrap(TrainingStabilizer, "run_microbatches", pieces)

    def made(self, stabilizer: TrainingStabilizer) -> None:
        """A stabilizer is there; it is the one we want if the captured weights fit its models."""
        run, notes = stabilizer._capture._run, stabilizer._capture.notes
        if self._stage.actor is None and notes is not None and fits(run.models, self._stage.incident.state["models"]):
            self._stabilizer = stabilizer
            actor = Actor(run.models, run.optimizer, run.scheduler, notes, lambda: stabilizer.steps, self._set_scale)
            self._stage.cast(actor)

    def _set_scale(self) -> None:
        assert self._stabilizer is not None
        incident, judge = self._stage.incident, self._stabilizer._judge
        used = incident.facts["configuration"].get("loss_scale")
        if judge.scaler is None or used is None:
            return
        saved = (incident.state.get("scaler") or {}).get("state")
        if saved:
            judge.scale_state = unpack(judge.scaler.init(), saved)
        judge.scaler.scale_of(judge.scale_state).fill_(number(used))

    def _ours(self, stabilizer: Any) -> bool:
        actor = self._stage.actor
        return actor is not None and stabilizer._capture.notes is actor.notes and not self._stage.is_over

    def _step(self, original: Any) -> Any:
        def step(stabilizer: Any, closure: Any = None) -> Any:
            if not self._ours(stabilizer):
                return original(stabilizer, closure)
            if self._stage.ready and not self._stage.goes_on:
                if closure is not None:
                    stabilizer._window.evaluate(closure)
                self._close(stabilizer)
            outcome = original(stabilizer, closure)
            if self._stage.ready and self._stage.goes_on and self._stage.is_last:
                self._stage.finish()
            elif self._stage.ready:
                self._stage.next_microbatch()
            elif not outcome.accumulating:
                self._stage.between_steps()
            return outcome

        return step

    def _flush(self, original: Any) -> Any:
        def flush(stabilizer: Any) -> Any:
            ours = self._ours(stabilizer) and self._stage.ready
            if ours and not self._stage.goes_on:
                self._close(stabilizer)
            outcome = original(stabilizer)
            if ours and self._stage.goes_on:
                self._stage.finish()
            return outcome

        return flush

    def _close(self, stabilizer: Any) -> None:
        if self._stage.is_last:
            stabilizer._capture.close_microbatch()
            self._stage.finish()


class _BareLoop:
    """A loop of the script's own: heard of through its optimizers and its backwards."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._ends_at_backward = stage.incident.facts["configuration"].get("ended") == "backward"
        self._optimizers: list[torch.optim.Optimizer] = []
        self._inside = False

    def install(self) -> None:
        self._stage.find_actor = self._find
        optimizers = self._optimizers

        def init(original: Any) -> Any:
            def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
                original(optimizer, *args, **kwargs)
                optimizers.append(optimizer)

            return made

        _wrap(torch.optim.Optimizer, "__init__", init)
        _wrap(torch.autograd, "backward", self._backward)
        _wrap(Tensor, "backward", self._backward)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _find(self) -> Actor | None:
        """The models with the captured weights' names and shapes that the newest optimizer trains."""
        saved = self._stage.incident.state["models"]
        for optimizer in reversed(self._optimizers):
            trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            models = [_model_for(state, trained) for state in saved]
            if models and all(model is not None for model in models):
                found = [model for model in models if model is not None]
                notes = StepNotes(found, found[0].parameters().__next__().device, step=0)
                return Actor(found, optimizer, None, notes, lambda: 0, self._set_scale)
        return None

    def _set_scale(self) -> None:
        used = self._stage.incident.facts["configuration"].get("loss_scale")
        if used is None:
            return
        for scaler in gc.get_objects():
            if issubclass(type(scaler), torch.amp.GradScaler) and scaler.is_enabled():
                scaler._init_scale = number(used)
                if scaler._scale is not None:
                    scaler._scale.fill_(number(used))

    def _backward(self, original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs.get("tensors")
            root = given[0] if isinstance(given, (list, tuple)) and given else given
            actor = self._stage.actor
            if self._inside or actor is None or self._stage.is_over or not isinstance(root, Tensor):
                return original(*args, **kwargs)
            self._inside = True
            try:
                actor.notes.ran_backward(root, None)
                result = original(*args, **kwargs)
            finally:
                self._inside = False
            if self._stage.ready:
                actor.notes.close_microbatch()
                if self._stage.is_last and self._ends_at_backward:
                    self._stage.finish()
                self._stage.next_microbatch()
            return result

        return backward

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        actor = self._stage.actor
        if actor is not None and optimizer is actor.optimizer and self._stage.ready and not self._stage.is_over:
            self._stage.finish()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stage.feeds or self._stage.ready:
            return
        if self._stage.actor is None and (found := self._find()) is not None and found.optimizer is optimizer:
            self._stage.cast(found)
        if self._stage.actor is not None and self._stage.actor.optimizer is optimizer:
            self._stage.between_steps()


def _model_for(state: Any, trained: set[int]) -> nn.Module | None:
    for found in gc.get_objects():
        if not issubclass(type(found), nn.Module):  # `isinstance` would wake lazy objects of other libraries
            continue
        if any(id(parameter) in trained for parameter in found.parameters()) and fits([found], [state]):
            return found  # type: ignore[no-any-return]
    return None
