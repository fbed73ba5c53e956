"""The whole state of a run as one nested value: gather it, check whether a saved one fits, load it.

A run consists of its models, optimizer, scheduler, `also_save`, the stabilizer's own state, the random streams and the
data position. A state is loaded completely or not at all.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch

from surefoot.core.nested import leaves
from surefoot.core.random_state import RandomStreams, read_streams, set_streams
from surefoot.errors import CheckpointError, SettingError
from surefoot.guard.changed_settings import log_changed_settings
from surefoot.guard.guard_state import GuardState, LiveGuardState
from surefoot.guard.plain_values import as_plain, check_saved_with_run, has_state, warn_of_changes
from surefoot.keep.buffers import infinite_buffers
from surefoot.keep.position.data import DataPosition
from surefoot.keep.replicated_state import ModelsAndOptimizer
from surefoot.keep.restore import (
    describe_optimizer,
    load_models,
    load_moments,
    load_optimizer,
    model_faults,
    optimizer_faults,
    refuse,
    scheduler_kind,
)
from surefoot.keep.staging import stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from surefoot.guard.backward import GradientWindowState
    from surefoot.guard.global_batch import GlobalBatch, GlobalBatchState
    from surefoot.keep.position.data import PositionState
    from surefoot.keep.restore import OptimizerDescription, OptimizerState

log = logging.getLogger("surefoot")

UNCHECKED = ("stabilizer", "scheduler", "streams", "data")
"""Parts of a checkpoint that may contain NaN on purpose, such as the windows of detectors.

A buffer that was infinite before the first step (a mask, the start of a minimum) may contain Inf too.
"""


class LiveStabilizerState(LiveGuardState):
    """The stabilizer's own state, including steps whose numbers may not have arrived yet."""

    window: GradientWindowState


class StabilizerState(GuardState):
    """The stabilizer's own state, as it is stored."""

    window: GradientWindowState


class PartsDescription(TypedDict):
    """The description that a saved state is compared with before it is loaded."""

    optimizer: OptimizerDescription | None
    scheduler: str | None
    """The class of the scheduler."""
    also: dict[str, OptimizerDescription | str | None]
    """The same for each optimizer and scheduler in `also_save`, by name."""


class LoadedTree(ModelsAndOptimizer):
    """The parts of a checkpoint that are loaded immediately."""

    scheduler: object
    """`state_dict()` of the scheduler; `None` without one."""
    also: dict[str, Any]
    """`state_dict()` of each object in `also_save`; for another stabilizer, a `RunTree`."""
    stabilizer: LiveStabilizerState | StabilizerState
    """Live until `settle` has waited for the numbers of the last steps."""


class MomentTree(TypedDict):
    """The content of a moment in memory besides the weights and the optimizer's moments."""

    groups: list[dict[str, Any]]
    """The settings of the optimizer's parameter groups."""
    scheduler: object
    also: dict[str, Any]
    stabilizer: LiveStabilizerState | StabilizerState
    streams: RandomStreams


class SharedBatch(TypedDict, total=False):
    """Stored with a run whose ranks share the rows of a step."""

    batch: GlobalBatchState


class RunTree(LoadedTree, SharedBatch):
    """A checkpoint of a whole run."""

    described: PartsDescription
    """Missing in checkpoints of older versions."""
    streams: RandomStreams
    data: PositionState


@dataclass(frozen=True)
class OwnState:
    """Functions that read and load the stabilizer's own state."""

    read: Callable[[], LiveStabilizerState]
    """Reads it with live tensors, and with steps whose numbers have not arrived yet."""
    settle: Callable[[LiveStabilizerState], StabilizerState]
    """Waits for those numbers."""
    load: Callable[[StabilizerState], None]
    load_rules: Callable[[StabilizerState], None]
    """Loads only what belongs to the weights."""


@dataclass(frozen=True)
class RunParts:
    """Everything of a run that a checkpoint contains."""

    models: Sequence[nn.Module]
    optimizer: Any
    scheduler: Any
    also: Mapping[str, Any]
    """Objects with `state_dict` and `load_state_dict`, and plain values."""
    own: OwnState


class RunState:
    """Reads and loads the state of one run."""

    def __init__(self, parts: RunParts, batch: GlobalBatch) -> None:
        check_saved_with_run(parts.also)
        self.parts, self.batch = parts, batch
        self.position = DataPosition()
        """The data position."""
        self._streams: RandomStreams | None = None
        self.following = FollowingWeights(parts.also, parts.optimizer)
        """The objects that return together with the weights."""
        self.unchecked = _unchecked(parts)
        """Paths in a checkpoint where NaN and Inf are allowed."""

    def gather(self) -> RunTree:
        """The whole run as one nested state of live tensors and plain values."""
        parts, batch = self.parts, self.batch.state_dict()
        tree: RunTree = {
            "models": [model.state_dict() for model in parts.models],
            "optimizer": parts.optimizer.state_dict(),
            "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
            "also": {name: full_state(thing) for name, thing in parts.also.items()},
            "described": self._described(),
            "stabilizer": parts.own.read(),
            # The current streams are meaningless until the data position is restored.
            "streams": self._streams if self.position.pending and self._streams else read_streams(),
            "data": self.position.state_dict(),
        }
        if batch is not None:
            tree["batch"] = batch
        return tree

    def settle(self, tree: RunTree) -> None:
        """Wait for the numbers of steps that had not arrived when `gather` returned the tree."""
        tree["stabilizer"] = self.parts.own.settle(cast("LiveStabilizerState", tree["stabilizer"]))
        for name, thing in self.parts.also.items():
            if is_stabilizer(thing):
                run_state_of(thing).settle(tree["also"][name])

    def apply(self, tree: RunTree) -> None:
        """Load the whole run. Raises `CheckpointError`, and changes nothing, unless all of it fits."""
        refuse(self.faults(tree))
        log_changed_settings(self.parts.optimizer, self.parts.scheduler, tree)
        before, streams = stage(self.state_to_restore()), read_streams()
        try:
            self.load(tree)
            set_streams(tree["streams"])
        except BaseException as error:
            before.wait()
            self.load(before.tree)
            set_streams(streams)
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(
                f"the checkpoint does not match this run: {type(error).__name__}: {str(error).rstrip('.')}. Nothing "
                "was loaded. Create the run as it was when the checkpoint was saved, or use another folder."
            ) from error
        self.find_place(tree)

    def faults(self, tree: Any) -> list[str]:
        """The reasons why a state cannot be loaded; changes nothing."""
        try:
            return self._faults(tree)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            return [f"it is not a state that a TrainingStabilizer saved ({type(error).__name__}: {error})"]

    def _faults(self, tree: RunTree) -> list[str]:
        parts = self.parts
        expected = ("models", "optimizer", "scheduler", "also", "stabilizer", "streams", "data")
        if missing := [part for part in expected if part not in tree]:
            return [f"it has no part {part!r}" for part in missing]
        if len(parts.models) != len(tree["models"]):
            return [f"it holds {len(tree['models'])} models, and the run has {len(parts.models)}"]
        then = tree.get("described")
        if then is None:
            log.warning(
                "surefoot: the checkpoint was saved by a version that did not save the names of parameters. Moments "
                "are assigned to parameters by position, and only shapes are compared."
            )
        described, then = then is not None, then or {"optimizer": None, "scheduler": None, "also": {}}
        faults = [
            fault
            for model, saved in zip(parts.models, tree["models"], strict=True)
            for fault in model_faults(model, saved)
        ]
        saved_optimizer = cast("OptimizerState", tree["optimizer"])
        faults += optimizer_faults(parts.optimizer, saved_optimizer, then["optimizer"], parts.models)
        if described:
            faults += _scheduler_faults(parts.scheduler, then["scheduler"])
        for name, thing in parts.also.items():
            if name in tree["also"]:
                found = self._faults_of(thing, tree["also"][name], then["also"].get(name))
                faults += [f"in {name!r}, {fault}" for fault in found]
        try:
            DataPosition().load_state_dict(tree["data"])
        except SettingError as error:
            faults.append(str(error))
        return faults

    def _faults_of(self, thing: Any, saved: Any, then: Any) -> list[str]:
        if is_stabilizer(thing):
            return list(run_state_of(thing).faults(saved))
        if isinstance(thing, torch.optim.Optimizer):
            return optimizer_faults(thing, saved, then, self._modules)
        return _scheduler_faults(thing, then) if _is_scheduler(thing) and then is not None else []

    def gather_moment(self) -> MomentTree:
        """Everything of the run except the weights, the optimizer's moments and the data position."""
        parts = self.parts
        return {
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in parts.optimizer.param_groups
            ],
            "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
            # Modules are part of the snapshot of the weights.
            "also": {
                name: full_state(thing)
                for name, thing in parts.also.items()
                if has_state(thing) and not isinstance(thing, torch.nn.Module)
            },
            "stabilizer": parts.own.read(),
            "streams": read_streams(),
        }

    def load_moment(self, tree: MomentTree) -> None:
        """Load the result of `gather_moment`. The caller sets the random streams after restoring the data position."""
        parts = self.parts
        for group, saved in zip(parts.optimizer.param_groups, tree["groups"], strict=False):
            for key in group.keys() - saved.keys() - {"params"}:
                del group[key]
            for key, value in saved.items():
                if isinstance(now := group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    now.copy_(value)  # compiled steps and CUDA graphs reference the tensor itself
                else:
                    group[key] = value
        # Loading may keep references to the objects it is given, and the moment may be restored again.
        if parts.scheduler is not None and tree["scheduler"] is not None:
            parts.scheduler.load_state_dict(copy.deepcopy(tree["scheduler"]))
        for name, saved in tree["also"].items():
            _load_also(parts.also[name], saved)
        own = parts.own.settle(cast("LiveStabilizerState", tree["stabilizer"]))
        parts.own.load(copy.deepcopy(own))

    def state_to_restore(self) -> LoadedTree:
        """The state to restore with `load` if a load fails: everything that surefoot and torch can read.

        Reading the state of other objects may change them (torchdata's loader begins to iterate).
        """
        parts, also = self.parts, dict[str, object]()
        for name, thing in parts.also.items():
            if is_stabilizer(thing):
                also[name] = run_state_of(thing).state_to_restore()
            elif isinstance(thing, (torch.nn.Module, torch.optim.Optimizer)) or _is_scheduler(thing):
                also[name] = thing.state_dict()
        return {
            "models": [model.state_dict() for model in parts.models],
            "optimizer": parts.optimizer.state_dict(),
            "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
            "also": also,
            "stabilizer": parts.own.settle(parts.own.read()),
        }

    def load(self, tree: LoadedTree) -> None:
        """Load everything except the data position and the random streams."""
        parts = self.parts
        load_models(parts.models, tree["models"])
        load_optimizer(parts.optimizer, cast("OptimizerState", tree["optimizer"]))
        if parts.scheduler is not None and tree["scheduler"] is not None:
            parts.scheduler.load_state_dict(tree["scheduler"])
        for name, thing in parts.also.items():
            if is_stabilizer(thing) and name in tree["also"]:
                run_state_of(thing).load(tree["also"][name])
            elif name in tree["also"] and isinstance(thing, torch.optim.Optimizer):
                load_optimizer(thing, tree["also"][name])
            elif name in tree["also"] and has_state(thing):
                thing.load_state_dict(tree["also"][name])
        parts.own.load(cast("StabilizerState", tree["stabilizer"]))

    def find_place(self, tree: RunTree) -> None:
        """Restore the data position; `restore_streams` restores the random streams together with it."""
        for name, thing in self.parts.also.items():
            if name not in tree["also"]:
                log.warning("surefoot: the checkpoint has no %r; it starts with a new state.", name)
            elif is_stabilizer(thing):
                run_state_of(thing).find_place(tree["also"][name])
            elif not has_state(thing):
                warn_of_changes(name, thing, tree["also"][name])
        self.position.load_state_dict(tree["data"])
        self.batch.load_state_dict(tree.get("batch"))
        self._streams = tree["streams"]

    @property
    def _modules(self) -> list[nn.Module]:
        """All modules whose parameters have names."""
        also = [thing for thing in self.parts.also.values() if isinstance(thing, torch.nn.Module)]
        return [*self.parts.models, *also]

    def _described(self) -> PartsDescription:
        """The description that a saved state is compared with before it is loaded."""
        parts = self.parts
        also: dict[str, OptimizerDescription | str | None] = {}
        for name, thing in parts.also.items():
            if isinstance(thing, torch.optim.Optimizer):
                also[name] = describe_optimizer(thing, self._modules)
            elif _is_scheduler(thing):
                also[name] = scheduler_kind(thing)
        optimizer = describe_optimizer(parts.optimizer, parts.models)
        return {"optimizer": optimizer, "scheduler": scheduler_kind(parts.scheduler), "also": also}

    def restore_streams(self) -> None:
        """Restore the random streams: the data position is restored."""
        if self._streams is not None:
            set_streams(self._streams)
            self._streams = None


def _unchecked(parts: RunParts) -> set[str]:
    names = [*UNCHECKED]
    names += [f"models.{i}.{name}" for i, model in enumerate(parts.models) for name in infinite_buffers(model)]
    for key, thing in parts.also.items():
        if isinstance(thing, torch.nn.Module):
            names += [f"also.{key}.{name}" for name in infinite_buffers(thing)]
        elif is_stabilizer(thing):
            names += [f"also.{key}.{name}" for name in run_state_of(thing).unchecked]
    return set(names)


def is_stabilizer(thing: Any) -> bool:
    """Whether an object saved with a run is a stabilizer with its own run."""
    return isinstance(getattr(getattr(thing, "_run", None), "run_state", None), RunState)


def run_state_of(stabilizer: Any) -> RunState:
    """The state of another stabilizer that is saved with this one, as in a GAN."""
    return stabilizer._run.run_state  # type: ignore[no-any-return]


def full_state(thing: Any) -> Any:
    """The complete state of an object: for a stabilizer, including model and optimizer; for a plain value, itself."""
    if is_stabilizer(thing):
        return run_state_of(thing).gather()
    return thing.state_dict() if has_state(thing) else as_plain(thing)


def _load_also(thing: Any, saved: Any) -> None:
    """Load an object saved with a run from a moment, which may be restored again."""
    if is_stabilizer(thing):
        other, saved = run_state_of(thing), {**saved, "also": dict(saved["also"])}
        other.settle(saved)
        other.load(copy.deepcopy(saved))
    elif isinstance(thing, torch.optim.Optimizer):
        load_optimizer(thing, saved)
    else:
        thing.load_state_dict(copy.deepcopy(saved))


def _is_scheduler(thing: Any) -> bool:
    return isinstance(thing, torch.optim.lr_scheduler.LRScheduler)


def _scheduler_faults(scheduler: Any, then: str | None) -> list[str]:
    """`then` is the kind of the saved scheduler; `None` if there was none."""
    now = scheduler_kind(scheduler)
    if then == now:
        return []
    if now is None:
        return [f"it was saved with the scheduler {then}, and the run has none"]
    if then is None:
        return [f"it was saved without a scheduler, and the run has {now}"]
    return [f"its scheduler is {then}, and the run's is {now}"]


class FollowingWeights:
    """The objects in `also_save` that follow the weights, and return together with them.

    These are other models (an average of the weights), optimizers and stabilizers, and any object that holds a copy of
    every trained parameter. A schedule, a loader or a counter does not return: only weights do.
    """

    def __init__(self, also: Mapping[str, Any], optimizer: Any) -> None:
        self._also, self._optimizer = dict(also), optimizer
        self._chosen: dict[str, Any] | None = None

    def read(self) -> dict[str, Any]:
        """The state of each, by name."""
        if self._chosen is None:
            self._chosen = {name: thing for name, thing in self._also.items() if self._follows(thing)}
        return {name: _weights_of(thing) for name, thing in self._chosen.items()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore the states; learning rates are kept."""
        for name, state in saved.items():
            thing = self._also[name]
            if is_stabilizer(thing):
                parts = run_state_of(thing).parts
                load_models(parts.models, state["models"])
                load_moments(parts.optimizer, state["optimizer"])
            elif isinstance(thing, torch.optim.Optimizer):
                load_moments(thing, state)
            else:
                thing.load_state_dict(state if isinstance(thing, torch.nn.Module) else copy.deepcopy(state))

    def load_from(self, saved: Mapping[str, Any]) -> None:
        """Restore their states from a checkpoint."""
        self.load({name: saved[name] for name in self.read() if name in saved})

    def _follows(self, thing: Any) -> bool:
        if is_stabilizer(thing) or isinstance(thing, (torch.nn.Module, torch.optim.Optimizer)):
            return True
        # Reading the state of a loader may begin an iteration.
        if not has_state(thing) or _is_scheduler(thing) or hasattr(thing, "__iter__"):
            return False
        shapes = Counter(parameter.shape for group in self._optimizer.param_groups for parameter in group["params"])
        held = Counter(leaf.shape for leaf in leaves(thing.state_dict()) if leaf.is_floating_point())
        return bool(shapes) and all(held[shape] >= count for shape, count in shapes.items())


def _weights_of(thing: Any) -> Any:
    if is_stabilizer(thing):
        parts = run_state_of(thing).parts
        return {"models": [model.state_dict() for model in parts.models], "optimizer": parts.optimizer.state_dict()}
    return thing.state_dict()
