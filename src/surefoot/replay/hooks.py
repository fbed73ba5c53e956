"""The hooks that inform a `FirstStep` about the script: one set for a loop with a stabilizer, one for a bare loop.

Run logs, checkpoints and incidents of the script are disabled, or redirected to a temporary folder. Nothing is ever
unwrapped: the process ends with the replay.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from surefoot.guard import attach as attaching
from surefoot.guard.data_loop import DrawnBatches
from surefoot.guard.stabilizer import TrainingStabilizer, run_of
from surefoot.record.incidents.bundle import IncidentKeeper
from surefoot.record.incidents.loader_batches import add_listener
from surefoot.record.incidents.reading import number
from surefoot.record.incidents.step_capture import StepCapture
from surefoot.record.log import RunLog
from surefoot.replay.first_step import FirstStep, LiveObjects
from surefoot.replay.state import fits
from surefoot.watch.first_model_call import FirstModelCall

if TYPE_CHECKING:
    from pathlib import Path


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def install(first_step: FirstStep, scratch: Path, **settings: Any) -> None:
    """Install the hooks for the kind of loop that was captured.

    `settings` override those that the script passes to a stabilizer.
    """
    add_listener(first_step)
    _wrap(DrawnBatches, "__next__", lambda original: lambda self: first_step.loader_drew(original(self)))
    if first_step.incident.facts["configuration"].get("loop") == "bare":
        _BareLoop(first_step).install()
        made: Callable[[Any], None] = lambda stabilizer: None  # noqa: E731
    else:
        loop = _GuardedLoop(first_step)
        loop.install()
        made = loop.made
    _quieten(scratch, made, settings)


def _quieten(scratch: Path, made: Callable[[Any], None], settings: Mapping[str, Any]) -> None:
    """Redirect or disable everything that surefoot writes in this script."""

    def init(original: Any) -> Any:
        def made_quiet(self: Any, *args: Any, **kwargs: Any) -> None:
            quiet = {"log": None, "checkpoints": None, "incidents": IncidentKeeper(scratch)}
            original(self, *args, **{**kwargs, **quiet, **settings})
            capture = run_of(self).capture
            if capture is not None:
                capture.notes.note_everything()
            made(self)

        return made_quiet

    def logged(original: Any) -> Any:
        return lambda self, folder, **settings: original(self, scratch / "log", **{**settings, "sinks": ()})

    def kept(original: Any) -> Any:
        return lambda incidents: None if incidents is None else IncidentKeeper(scratch)

    _wrap(attaching, "keeper_for", kept)
    _wrap(TrainingStabilizer, "__init__", init)
    _wrap(TrainingStabilizer, "restore", lambda _: lambda self, which="latest": None)
    _wrap(TrainingStabilizer, "save", lambda _: lambda self, metric=None: None)
    _wrap(RunLog, "__init__", logged)


class _GuardedLoop:
    """A loop with a stabilizer, which provides the models and the time of each step."""

    def __init__(self, first_step: FirstStep) -> None:
        self._first_step = first_step
        self._stabilizer: TrainingStabilizer | None = None

    def install(self) -> None:
        _wrap(TrainingStabilizer, "step", self._step)
        _wrap(TrainingStabilizer, "flush", self._flush)
        first_step = self._first_step

        def pieces(original: Any) -> Any:
            return lambda self, loss_fn, batch, *, weight=None: original(
                self, loss_fn, first_step.feed(batch, "given"), weight=weight
            )

        _wrap(TrainingStabilizer, "run_microbatches", pieces)

    def made(self, stabilizer: TrainingStabilizer) -> None:
        """A stabilizer was created; it is used if the captured weights fit its models."""
        run = run_of(stabilizer)
        notes = None if run.capture is None else run.capture.notes.capture
        if (
            self._first_step.objects is None
            and notes is not None
            and fits(run.models, self._first_step.incident.state["models"])
        ):
            self._stabilizer = stabilizer
            objects = LiveObjects(
                run.models, run.optimizer, run.scheduler, notes, lambda: stabilizer.steps, self._set_scale
            )
            self._first_step.use(objects)

    def _set_scale(self) -> None:
        assert self._stabilizer is not None
        incident = self._first_step.incident
        used = incident.facts["configuration"].get("loss_scale")
        if used is not None:
            saved = (incident.state.get("scaler") or {}).get("state")
            run_of(self._stabilizer).guard.policy.set_loss_scale(number(used), saved)

    def _ours(self, stabilizer: Any) -> bool:
        objects = self._first_step.objects
        capture = run_of(stabilizer).capture
        if objects is None or capture is None or self._first_step.is_over:
            return False
        return capture.notes.capture is objects.notes

    def _step(self, original: Any) -> Any:
        def step(stabilizer: Any, closure: Any = None) -> Any:
            if not self._ours(stabilizer):
                return original(stabilizer, closure)
            if self._first_step.ready and not self._first_step.continues:
                if closure is not None:
                    run_of(stabilizer).window.evaluate(closure)
                self._close(stabilizer)
            outcome = original(stabilizer, closure)
            if self._first_step.ready and self._first_step.continues and self._first_step.is_last:
                self._first_step.finish()
            elif self._first_step.ready:
                self._first_step.next_microbatch()
            elif not outcome.accumulating:
                self._first_step.between_steps()
            return outcome

        return step

    def _flush(self, original: Any) -> Any:
        def flush(stabilizer: Any) -> Any:
            ours = self._ours(stabilizer) and self._first_step.ready
            if ours and not self._first_step.continues:
                self._close(stabilizer)
            outcome = original(stabilizer)
            if ours and self._first_step.continues:
                self._first_step.finish()
            return outcome

        return flush

    def _close(self, stabilizer: Any) -> None:
        if self._first_step.is_last:
            capture = run_of(stabilizer).capture
            if capture is not None:
                capture.notes.close_microbatch()
            self._first_step.finish()


class _BareLoop:
    """A loop of the script's own: observed through its optimizers and its backward calls."""

    def __init__(self, first_step: FirstStep) -> None:
        self._first_step = first_step
        self._ends_at_backward = first_step.incident.facts["configuration"].get("ended") == "backward"
        self._turn = Turn.read(first_step.incident.facts["configuration"].get("turn"))
        self._optimizers: list[torch.optim.Optimizer] = []
        """Those of this run of the script."""
        self._run = 0
        self._first_call = FirstModelCall(self._called)
        self._inside = False

    def install(self) -> None:
        self._first_step.find_objects = self._find

        def init(original: Any) -> Any:
            def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
                original(optimizer, *args, **kwargs)
                self._made(optimizer)

            return made

        _wrap(torch.optim.Optimizer, "__init__", init)
        _wrap(torch.autograd, "backward", self._backward)
        _wrap(Tensor, "backward", self._backward)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _made(self, optimizer: torch.optim.Optimizer) -> None:
        if self._run != self._first_step.runs:
            self._run, self._optimizers = self._first_step.runs, []
            if not self._first_step.feeds and self._turn is not None and self._turn.after is None:
                self._first_call.open()
        self._optimizers.append(optimizer)

    def _find(self) -> LiveObjects | None:
        """The models that fit the captured weights, and the optimizer of the record, or the newest."""
        if self._turn is not None:
            known = self._optimizers[self._turn.optimizer : self._turn.optimizer + 1]
        else:
            known = self._optimizers[::-1]
        for optimizer in known:
            found = self._models_for(optimizer)
            if found:
                notes = StepCapture(found, found[0].parameters().__next__().device, step=0)
                return LiveObjects(found, optimizer, None, notes, lambda: 0, self._set_scale)
        return None

    def _models_for(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """A model for each of the captured ones, or none."""
        found: list[nn.Module] = []
        for state in self._first_step.incident.state["models"]:
            model = _model_for(state, partial(self._suits, len(found), optimizer), found)
            if model is None:
                return []
            found.append(model)
        return found

    def _suits(self, place: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
        """Whether a model is trained by the same optimizers as a captured one, or else by the given one."""
        if self._turn is None or place >= len(self._turn.trained_by):
            return _trains(optimizer, model)
        return [i for i, each in enumerate(self._optimizers) if _trains(each, model)] == self._turn.trained_by[place]

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module is called before any step: if it is the captured model, the captured step begins here."""
        first_step = self._first_step
        if first_step.ready or first_step.is_over or not torch.is_grad_enabled():
            return None
        if first_step.objects is None and (found := self._find()) is not None:
            first_step.use(found)
        if first_step.objects is None or not any(module is model for model in first_step.objects.models):
            return None
        self._first_call.close()
        first_step.begin()
        replaced = first_step.replace_inputs(module, args, kwargs)  # its own hooks are active from the next call
        if replaced is not None:
            args, given = replaced
            kwargs.clear()
            kwargs.update(given)
        first_step.objects.notes.called(module, args, dict(kwargs))
        return args

    def _set_scale(self) -> None:
        used = self._first_step.incident.facts["configuration"].get("loss_scale")
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
            objects = self._first_step.objects
            if self._inside or objects is None or self._first_step.is_over or not isinstance(root, Tensor):
                return original(*args, **kwargs)
            self._inside = True
            try:
                objects.notes.ran_backward(root, None)
                result = original(*args, **kwargs)
            finally:
                self._inside = False
            if self._first_step.ready:
                objects.notes.close_microbatch()
                if self._first_step.is_last and self._ends_at_backward:
                    self._first_step.finish()
                self._first_step.next_microbatch()
            return result

        return backward

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        objects = self._first_step.objects
        if (
            objects is not None
            and optimizer is objects.optimizer
            and self._first_step.ready
            and not self._first_step.is_over
        ):
            self._first_step.finish()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._first_call.close()
        if self._first_step.feeds or self._first_step.ready:
            return
        if self._first_step.objects is None and (found := self._find()) is not None:
            self._first_step.use(found)
        objects = self._first_step.objects
        if objects is not None and optimizer is self._step_before(objects):
            objects.notes.moved_to(objects.step(), under_way=False)  # what was recorded so far belongs to another step
            self._first_step.between_steps()

    def _step_before(self, objects: LiveObjects) -> Any:
        """The optimizer whose step came right before the captured one."""
        if self._turn is None or self._turn.after is None or self._turn.after >= len(self._optimizers):
            return objects.optimizer
        return self._optimizers[self._turn.after]


@dataclass(frozen=True)
class Turn:
    """The position of the captured step among those of several optimizers, which are numbered in order of creation."""

    optimizer: int
    after: int | None
    """Which one stepped right before; `None` if none had."""
    trained_by: list[list[int]]
    """For each model, the optimizers that train it."""

    @classmethod
    def read(cls, stored: Any) -> Turn | None:
        """Read from an incident; `None` if it has no such entry."""
        try:
            after = None if stored["after"] is None else int(stored["after"])
            return cls(int(stored["optimizer"]), after, [[int(n) for n in each] for each in stored["trained_by"]])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None


def _trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def _model_for(state: Any, suits: Callable[[nn.Module], bool], taken: list[nn.Module]) -> nn.Module | None:
    for found in gc.get_objects():
        if not issubclass(type(found), nn.Module):  # `isinstance` would load lazy objects of other libraries
            continue
        if suits(found) and fits([found], [state]) and not any(found is other for other in taken):
            return found  # type: ignore[no-any-return]
    return None
