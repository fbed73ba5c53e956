"""Observes checkpoints: states loaded into models, optimizers and schedules, saved states, and the content of files.

The kinds of state in a file are recorded, by their keys, and its step number; no other value is read. A loaded state is
matched with its file by the identity of its dictionary; nothing is kept alive for that.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from surefoot.core.function_hooks import Hook
from surefoot.core.user_code import is_users
from surefoot.keep.restore import load_models
from surefoot.record.facts import (
    FileLoadedEvent,
    FileSavedEvent,
    ModelLoadedEvent,
    OptimizerLoadedEvent,
    ScalerLoadedEvent,
    SchedulerLoadedEvent,
)
from surefoot.watch.user_frames import caller, is_library, site

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher


_STEP_NAMES = frozenset(("step", "steps", "global_step", "iteration", "iter"))
_MOST_STATES, _MOST_PATHS = 64, 64

_WHY_LOADED = "which states are loaded when a checkpoint is resumed"
_WHY_FILE = "which states a checkpoint contains"
_WHY_SWAP = "torch does not swap a tensor that has weak references: surefoot drops its references during the call"


def wrap_states(watcher: Watcher, wrapping: Hooks) -> None:
    """Observe loading and saving."""
    states = _StateCalls(watcher)
    wrapping.add(torch.utils, "swap_tensors", "states", _WHY_SWAP, states.before_swap, last=states.after_swap)
    wrapping.after(nn.Module, "load_state_dict", "states", states.module_loaded, _WHY_LOADED)
    # The resume of a stabilizer: sharded weights do not go through `load_state_dict`. Not in `docs/run.md`.
    resumed = Hook(lambda args, kwargs: (args, kwargs), states.models_restored)
    wrapping.hook("states", load_models, resumed)
    wrapping.after(Optimizer, "load_state_dict", "states", states.optimizer_loaded, _WHY_LOADED)
    wrapping.after(LRScheduler, "load_state_dict", "states", states.scheduler_loaded, _WHY_LOADED)
    wrapping.after(GradScaler, "load_state_dict", "states", states.scaler_loaded, _WHY_LOADED)
    wrapping.after(torch.serialization, "load", "states", states.file_loaded, _WHY_FILE)
    wrapping.after(torch.serialization, "save", "states", states.file_saved, _WHY_FILE)


class _StateCalls:
    """Records each call that loads, saves or swaps states."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._state, self._probes = watcher, watcher.state, watcher.probes
        self._events = watcher.events
        self._files = _Files()

    def module_loaded(self, result: Any, args: Any, kwargs: Any) -> None:
        frame = caller()
        if frame is None or not (is_users(frame.f_code.co_filename) or is_library(frame.f_code.co_filename)):
            return
        missing = frozenset(getattr(result, "missing_keys", ()))
        names = [name for name, _ in args[0].named_parameters()]
        for name, tensor in args[0].named_parameters():
            if name not in missing:
                self._watcher.registry.add(tensor).loaded = True
        if is_users(frame.f_code.co_filename):
            state = _given_state(args, kwargs)
            unexpected = frozenset(getattr(result, "unexpected_keys", ()))
            is_lost = isinstance(state, dict) and state and names and unexpected.issuperset(state)
            unmatched = [str(next(iter(state))), names[0]] if is_lost else None
            self._events.add(
                ModelLoadedEvent(step=self._state.steps, site=site(4), file=self._files.of(state), unmatched=unmatched)
            )

    def models_restored(self, call: Any, _: Any) -> None:
        if self._probes.here():
            self._probes.safely("states", self._restored, call[0][0])

    def _restored(self, models: Any) -> None:
        for model in models:
            for tensor in model.parameters():
                self._watcher.registry.add(tensor).loaded = True
        self._events.add(ModelLoadedEvent(step=self._state.steps, site=site(4)))

    def optimizer_loaded(self, result: Any, args: Any, kwargs: Any) -> None:
        frame = caller()
        if not args[0].state and frame is not None and is_library(frame.f_code.co_filename):
            return  # a trainer moves a new optimizer to its device this way: there is no state to resume
        record = self._watcher.steps.record_of(args[0])
        record.loaded_at = record.series.count
        self._watcher.sampler.sample_soon()
        ages = [float(state["step"]) for state in args[0].state.values() if "step" in state]
        record.loaded_age = max(ages) if ages else None
        file = self._files.of(_given_state(args, kwargs))
        self._events.add(
            OptimizerLoadedEvent(
                step=self._state.steps, site=site(4), optimizer=record.number, file=file, age=record.loaded_age
            )
        )

    def scaler_loaded(self, result: Any, args: Any, kwargs: Any) -> None:
        self._events.add(ScalerLoadedEvent(step=self._state.steps, site=site(4)))

    def scheduler_loaded(self, result: Any, args: Any, kwargs: Any) -> None:
        self._events.add(SchedulerLoadedEvent(step=self._state.steps, site=site(4)))

    def file_loaded(self, result: Any, args: Any, kwargs: Any) -> None:
        self._files.note_loaded(result)
        self._events.add(
            FileLoadedEvent(
                step=self._state.steps,
                site=site(4),
                holds=_states_in(result),
                backward=self._state.backwards,
                progress=_step_in(result),
                moments_age=_age_in(result),
                saved_at_step=self._files.saved_at(args[0] if args else kwargs.get("f")),
                scaler_attempts=self._state.scaler.attempts,
            )
        )

    def file_saved(self, result: Any, args: Any, kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("obj")
        self._files.note_saved(args[1] if len(args) > 1 else kwargs.get("f"), self._state.steps)
        self._events.add(FileSavedEvent(step=self._state.steps, site=site(4), holds=_states_in(given)))

    def before_swap(self, args: Any, kwargs: Any) -> Any:
        tensors = tuple(each for each in args if isinstance(each, Tensor))
        return self._probes.safely("states", self._watcher.before_swap, tensors) if self._probes.here() else None

    def after_swap(self, swapped: Any) -> None:
        self._probes.safely("states", swapped)


class _Files:
    """The dictionaries loaded from each file, and the step at which this run wrote each file."""

    def __init__(self) -> None:
        self._loaded = 0
        self._states: deque[tuple[int, int]] = deque(maxlen=_MOST_STATES)
        """Identities of dictionaries with the number of their file, newest last."""
        self._saved: dict[str, int] = {}
        """The step at which each path was last written."""

    def note_loaded(self, value: Any) -> None:
        """A file was read."""
        inner = list(value.values())[:64] if isinstance(value, dict) else []
        self._states.extend((id(item), self._loaded) for item in (*inner, value) if isinstance(item, dict))
        self._loaded += 1

    def note_saved(self, file: Any, step: int) -> None:
        """A file was written."""
        if (path := _path_of(file)) is not None:
            self._saved.pop(path, None)
            self._saved[path] = step
            if len(self._saved) > _MOST_PATHS:
                del self._saved[next(iter(self._saved))]

    def of(self, state: Any) -> int | None:
        """The number of the file that a state came from."""
        return next((file for known, file in reversed(self._states) if known == id(state)), None)

    def saved_at(self, file: Any) -> int | None:
        """The step at which this run wrote a file."""
        path = _path_of(file)
        return None if path is None else self._saved.get(path)


def _path_of(file: Any) -> str | None:
    return os.path.abspath(file) if isinstance(file, (str, Path)) else None


def _given_state(args: Any, kwargs: Any) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("state_dict")


def _step_in(value: Any) -> int | None:
    """The step number in a checkpoint."""
    values = value if isinstance(value, dict) else {}
    found = [item for key, item in values.items() if str(key).lower() in _STEP_NAMES and type(item) is int]
    return found[0] if found else None


def _age_in(value: Any) -> int | None:
    """The number of steps of the only optimizer state in a checkpoint; `None` if there are several, or it has none."""
    values = value if isinstance(value, dict) else {}
    inner = [item for item in list(values.values())[:64] if isinstance(item, dict)]
    states = [item for item in inner if set(item) >= {"state", "param_groups"}]
    moments = states[0]["state"] if len(states) == 1 else {}
    first = next(iter(moments.values()), None)  # one read: the others have made as many steps
    age = first.get("step") if isinstance(first, dict) else None
    is_count = isinstance(age, (int, float)) or (isinstance(age, Tensor) and age.numel() == 1)
    return int(age) if age is not None and is_count else None


def _states_in(value: Any) -> list[str]:
    """The kinds of state in a checkpoint."""
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
