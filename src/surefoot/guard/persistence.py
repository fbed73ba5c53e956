"""What a run holds on to: snapshots in memory, checkpoints on disk, the place in the data, signals to stop.

`TrainingStabilizer` tells it when a step is done and when to go back; it decides nothing itself. Two kinds of return:

- to earlier *weights* (`return_to`): the run goes on with the next data, its schedule and its learning rates;
- to an earlier *moment* (`restore`): everything, random streams and the place in the data included, so that the run
  continues bit for bit as if it had never stopped.

The moment that a checkpoint is of lies between two batches: what the loop does after `step()` with a batch (an average
of the weights, the other model of a GAN) belongs to it. So a save that is due waits until the next batch is asked for,
and so does a stop. Where batches are not drawn from `resume`, or one of them takes several steps, the end of the step
has to do.

A checkpoint is staged at the step it belongs to and handed to the writer once the host knows the verdict on that step,
which on a GPU is a few steps later: by then its numbers have arrived and reading them waits for nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from surefoot.core.device import free_bytes
from surefoot.core.random_state import RandomStreams, read_streams, set_streams
from surefoot.decide.agreement import copies_of_first
from surefoot.errors import CheckpointError, SettingError, UsageError
from surefoot.keep.buffers import infinite_buffers
from surefoot.keep.checkpoint.selection import NONE, CheckpointSelector
from surefoot.keep.position.data import DataPosition
from surefoot.keep.position.workers import worker_died
from surefoot.keep.replicated_state import leave_out_copies
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
from surefoot.keep.snapshots import SnapshotRing, TrainedState
from surefoot.keep.staging import Place, Staged, bytes_of, stage
from surefoot.keep.stop_signals import StopSignals, StopWaiting
from surefoot.record.incidents.random_streams import QuickStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from surefoot.decide.agreement import Ranks
    from surefoot.decide.recovery import TrainingRecovery
    from surefoot.keep.checkpoint.manager import CheckpointManager

log = logging.getLogger("surefoot")

UNCHECKED = ("stabilizer", "scheduler", "streams", "data")
"""Parts of a checkpoint that may hold NaN on purpose, such as the windows of detectors.

So may a buffer that was infinite before the first step (a mask, the start of a minimum): that was no accident.
"""
ROOM = 1.5
"""How many times the size of a state must be free on a GPU for it to be staged there."""


@dataclass(frozen=True)
class OwnState:
    """The stabilizer's own state: how to read and load it."""

    read: Callable[[], dict[str, Any]]
    """With live tensors, and with steps whose numbers are still on their way."""
    settle: Callable[[dict[str, Any]], dict[str, Any]]
    """Waits for those numbers."""
    load: Callable[[dict[str, Any]], None]
    load_rules: Callable[[dict[str, Any]], None]
    """Only what belongs to the weights."""


@dataclass(frozen=True)
class RunParts:
    """Everything of a run that a checkpoint holds."""

    models: Sequence[nn.Module]
    optimizer: Any
    scheduler: Any
    also: Mapping[str, Any]
    """Whatever else has `state_dict` and `load_state_dict`."""
    own: OwnState


@dataclass(frozen=True)
class _Owed:
    """A checkpoint that is due."""

    step: int
    unrest: Callable[[], tuple[str, ...]]
    metric: Callable[[], float | None]


@dataclass(frozen=True)
class _Waiting:
    """A checkpoint that is staged, and waits for the verdict on its step, or for the writer."""

    owed: _Owed
    staged: Staged
    is_judged: bool = False

    def judged(self) -> _Waiting:
        """The same with the verdict as it is now, whatever comes later."""
        if self.is_judged:
            return self
        unrest, metric = self.owed.unrest(), self.owed.metric()
        return _Waiting(_Owed(self.owed.step, lambda: unrest, lambda: metric), self.staged, is_judged=True)


class RunPersistence:
    """Snapshots, checkpoints, data position and signals of one run."""

    def __init__(
        self,
        parts: RunParts,
        state: TrainedState,
        checkpoints: CheckpointManager | None,
        recovery: TrainingRecovery | None,
        lag_steps: int,
        ranks: Ranks,
        *,
        on_draw: Callable[[Any], None],
        on_stop_point: Callable[[], None],
        on_resume: Callable[[int, Path], None] | None = None,
    ) -> None:
        """Look after the run from here on.

        Args:
            parts: everything that a checkpoint holds.
            state: what a snapshot holds.
            checkpoints: where and how often to save.
            recovery: how often to take snapshots.
            lag_steps: how many steps later the result of a step is read.
            ranks: the processes that train together.
            on_draw: called with each batch that was drawn from `resume`.
            on_stop_point: called where the run can stop; saves and exits if it was asked to.
            on_resume: called with the step and the folder when the run continues from a checkpoint.
        """
        self._parts, self._state, self._checkpoints, self._lag = parts, state, checkpoints, lag_steps
        self._ranks, self._homecoming = ranks, CheckpointSelector(checkpoints, ranks)
        if checkpoints is not None:
            checkpoints.belong_to(self)
        self._copies_first = (
            checkpoints is not None
            and ranks.place > 0
            # Those that train together are those that save together: the first of them is rank 0 of the parts.
            and (checkpoints.rank, checkpoints.world_size) == (ranks.place, ranks.count)
            and copies_of_first(parts.models, parts.optimizer)
        )
        self.ring = (
            SnapshotRing(state, recovery.every_steps, recovery.keep, recovery.device_bytes) if recovery else None
        )
        self._margin = recovery.margin_steps if recovery else None
        self.position = DataPosition()
        self._quick_streams = QuickStreams() if checkpoints is not None else None
        self.interrupts = StopSignals(checkpoints.signals if checkpoints else ())
        self._waiting: deque[_Waiting] = deque()
        self._streams: RandomStreams | None = None
        self._restored = False
        self._owed: _Owed | None = None
        self._drawer: int | None = None  # the thread that batches are drawn in
        self._stepper: int | None = None  # the one that trains
        self._drawn = False
        self.drew, self._on_stop_point, self._on_resume = on_draw, on_stop_point, on_resume
        self.unchecked = _unchecked(parts)
        """Paths in a checkpoint under which NaN and Inf are no damage."""

    # ---- while the run goes on ------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """The optimizer is about to write: copies under way must be complete by then."""
        if self._checkpoints is not None:
            self._checkpoints.check_owner(self)
        self._owed = None  # one that waited for the next batch in vain; it is still due after this step
        if self.ring is not None:
            self.ring.hold_updates()
        for waiting in self._waiting:
            waiting.staged.hold_updates()

    def after_step(
        self, step: int, healthy: bool, unrest: Callable[[], tuple[str, ...]], metric: Callable[[], float | None]
    ) -> None:
        """`step` optimizer steps are done: copy what is due, now or when the next batch is asked for."""
        if self.ring is not None and healthy:
            self.ring.settle()
            self.ring.take_if_due(step)
        elif self.ring is not None and self._margin is not None:
            self.ring.note_trouble(step, step - self._lag - 1 - self._margin)
        if self._checkpoints is None:
            return
        self._hand_on_ripe(step)
        if not self._waiting and self._checkpoints.due(step):
            self._owed = _Owed(step, unrest, metric)
            if not self.between_batches_soon:
                self._pay()

    @property
    def between_batches_soon(self) -> bool:
        """Whether this was the first step since a batch was drawn from `resume`, so that the next may be drawn now."""
        return self._drawn and self._drawer == threading.get_ident()

    def step_over(self) -> None:
        """All that a step calls for is done."""
        self._drawn, self._stepper = False, threading.get_ident()

    def before_draw(self) -> bool:
        """The next batch is asked for; returns whether this is a moment between two."""
        between = not self._drawn  # with two loaders side by side, before the first of the two
        if between:
            self.stop_here()
        self._drawer, self._drawn = threading.get_ident(), True
        return between

    def draw(self, batches: Iterator[Any], between: bool) -> Any:
        """The next batch. The time that it is waited for belongs to the moment before it: a signal is acted upon."""
        if not (between and self._may_stop_waiting):
            return next(batches)
        assert self._quick_streams is not None
        mark, streams = self.position.mark(), self._quick_streams.note()
        try:
            try:
                self.interrupts.begin_waiting()
                return next(batches)
            finally:
                self.interrupts.end_waiting()
        except StopWaiting:
            if self.position.back_to(mark):
                set_streams(streams.full())
            self.stop_here()
            raise

    @property
    def _may_stop_waiting(self) -> bool:
        """Whether a signal may end the waiting for a batch: not that of one rank alone, which the others wait for."""
        if self._quick_streams is None or self._ranks.several or self._stepper not in (None, threading.get_ident()):
            return False
        return threading.current_thread() is threading.main_thread() and self.position.can_mark

    def stop_here(self) -> None:
        """Save what is due, and stop if asked to, unless this is a thread that draws ahead of the one that trains."""
        if self._stepper in (None, threading.get_ident()):
            self._pay()
            self._on_stop_point()

    def after_draws(self) -> None:
        """No more batches are asked for. There may be no further step: what is due is handed on now."""
        if self._drawer != threading.get_ident():
            return
        died: Exception | None = None
        while self._owed is not None or self._waiting:
            try:
                self._pay()
                self._hand_on_all()
            except Exception as error:  # torch says that a worker is gone wherever the program happens to be
                if not worker_died(error):
                    raise
                died = error
        self._drawer = None
        if died is not None:
            raise died

    def _hand_on_all(self) -> None:
        while self._waiting and self._checkpoints is not None:
            self._checkpoints.wait()
            self._hand_on_first()

    def _pay(self) -> None:
        """Copy what is due."""
        owed = self._owed
        if owed is None:
            return
        self._waiting.append(_Waiting(owed, self._staged()))
        self._owed = None
        self._hand_on_ripe(owed.step)

    def _hand_on_ripe(self, step: int) -> None:
        """Hand on the copies whose steps the host knows all about, unless the one before is still being written.

        One that has to wait for that is judged now: later the run may be quiet again, and the copy would pass for good.
        """
        assert self._checkpoints is not None
        while self._waiting and self._waiting[0].owed.step + self._lag <= step:
            if self._checkpoints.busy:
                self._waiting[0] = self._waiting[0].judged()
                return
            self._hand_on_first()

    def _hand_on_first(self) -> None:
        waiting = self._waiting.popleft()
        try:
            self._hand_on(waiting)
        except Exception as error:
            if worker_died(error):  # that has nothing to do with the save: it is made when the loop is left
                self._waiting.appendleft(waiting)
            raise

    def _staged(self) -> Staged:
        tree = self.gather()
        if self._copies_first:
            leave_out_copies(tree, self._parts.models)
        return stage(tree, _place_for(tree))

    def _hand_on(self, waiting: _Waiting, metric_given: bool = False, blocking: bool = False) -> bool:
        assert self._checkpoints is not None
        tree, unrest = waiting.staged.tree, waiting.owed.unrest()
        self.settle(tree)
        return self._checkpoints.save(
            tree,
            waiting.owed.step,
            quiet=not unrest,
            reasons=unrest,
            metric=waiting.owed.metric(),
            metric_given=metric_given,
            unchecked=self.unchecked,
            staged=waiting.staged,
            blocking=blocking,
        )

    def settle(self, tree: dict[str, Any]) -> None:
        """Wait for the numbers of steps that were still on their way when `gather` gave the tree."""
        tree["stabilizer"] = self._parts.own.settle(tree["stabilizer"])
        for name, thing in self._parts.also.items():
            if hasattr(thing, "_persistence"):
                thing._persistence.settle(tree["also"][name])

    def save(self, step: int, unrest: tuple[str, ...], metric: float | None, given: bool = False) -> None:
        """Save now, and come back when it is written. Raises `CheckpointError` if it cannot be."""
        if self._checkpoints is None:
            raise UsageError(
                "there is nowhere to save to: give the stabilizer `checkpoints=CheckpointManager(folder)`."
            )
        self._checkpoints.check_owner(self)
        self._waiting.clear()
        self._owed = None
        owed = _Owed(step, lambda: unrest, lambda: metric)
        if not self._hand_on(_Waiting(owed, self._staged()), metric_given=given, blocking=True):
            error = self._checkpoints.last_error
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self._checkpoints.folder}: "
                f"{error or type(error).__name__}. {self._checkpoints.newest_good_age(step)} Make room or mend the "
                "folder, then call `save()` again; the run itself is untouched."
            ) from error

    def save_evidence(self, step: int, reason: str) -> Path | None:
        """Keep a run that is about to halt as it is; says where, or `None` if there is no place for it."""
        if self._checkpoints is None:
            return None
        try:
            self.save(step, (reason,), None)
        except CheckpointError as error:  # why the run halts matters more
            log.error("surefoot: %s", error)
            return None
        return next((found.path for found in self._checkpoints.checkpoints() if found.step == step), None)

    # ---- going back to earlier weights ----------------------------------------------------------------------------

    def weights_had_moved(self, typical_gradient: Callable[[int, int], float]) -> bool:
        """Whether the weights had moved further than training usually takes them, when the trouble under way began."""
        return self.ring is None or self.ring.had_moved(typical_gradient)

    def return_to(self, before: int, tried: int, keep_present: bool) -> str | None:
        """Write earlier weights back; says where to, or `None` if there is nothing to return to."""
        self._waiting.clear()
        if self.ring is not None:
            step = self.ring.return_to(before, tried, keep_present)
            if step is not None:
                return f"the state before step {step}, kept in memory"
        if self._checkpoints is None:
            return None
        self._checkpoints.wait()
        in_memory = len(self.ring) if self.ring is not None else 0
        good = [found.step for found in self._checkpoints.checkpoints() if found.good and found.step <= before]
        candidates = iter(good[max(tried - in_memory, 0) :])
        # Ranks may see different checkpoints, as one part is written sooner than another: the first rank's list counts.
        while (step := self._ranks.of_first(next(candidates, NONE))) != NONE:
            tree = self._loaded(step)
            if self._ranks.any(tree is None):
                continue
            if self.ring is not None and keep_present:
                self.ring.keep_abandoned()
            load_models(self._parts.models, tree["models"])
            load_moments(self._parts.optimizer, tree["optimizer"])
            self._parts.own.load_rules(tree["stabilizer"])
            return f"the checkpoint of step {step}"
        return None

    def _loaded(self, step: int) -> Any:
        found = self._homecoming.load_here(step)
        if isinstance(found, Exception):
            log.warning("surefoot: the checkpoint of step %d cannot be returned to: %s", step, found)
            return None
        if found is None:
            return None
        if faults := self.faults(found.tree):
            log.warning("surefoot: the checkpoint of step %d cannot be returned to: %s", step, "; ".join(faults[:5]))
            return None
        return found.tree

    def forget_snapshots(self) -> None:
        """The run has other parameters now: snapshots no longer fit it."""
        if self.ring is not None:
            self.ring.clear()

    def reset_moments(self) -> None:
        """Forget what the optimizer has gathered."""
        self._state.reset_moments()

    def take_back(self) -> bool:
        """Undo the last return."""
        return self.ring is not None and self.ring.take_back()

    # ---- coming back to an earlier moment -------------------------------------------------------------------------

    def gather(self) -> dict[str, Any]:
        """The whole run as one nested state of live tensors and plain values."""
        parts = self._parts
        return {
            "models": [model.state_dict() for model in parts.models],
            "optimizer": parts.optimizer.state_dict(),
            "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
            "also": {name: full_state(thing) for name, thing in parts.also.items()},
            "described": self._described(),
            "stabilizer": parts.own.read(),
            # Until the data are back in place, the streams as they are mean nothing.
            "streams": self._streams if self.position.pending and self._streams else read_streams(),
            "data": self.position.state_dict(),
        }

    def restore(self, which: Any = "latest") -> int | None:
        """Continue from a checkpoint; returns its step, or `None` if there is none yet.

        The random streams are put back when the data are back in place, or now if no data are followed.
        """
        if self._checkpoints is None:
            raise UsageError(
                "there is nothing to resume from: give the stabilizer `checkpoints=CheckpointManager(folder)`."
            )
        self._checkpoints.check_owner(self)
        self._restored, self._owed = True, None
        self._homecoming.check_that_all_save()
        found = self._homecoming.load(which)
        if found is None:
            return None
        self.apply(found.tree)
        if self.ring is not None:
            self.ring.take(found.step)
        log.info("surefoot: continuing %s from step %d", found.path, found.step)
        if self._on_resume is not None:
            self._on_resume(int(found.step), found.path)
        return int(found.step)

    def restore_once(self) -> None:
        """Continue from the newest checkpoint, the first time this is asked."""
        if self._restored:
            return
        self._restored = True
        if self._checkpoints is not None:
            self.restore()
        else:
            self._homecoming.check_that_all_save()

    def apply(self, tree: dict[str, Any]) -> None:
        """Load the whole run. Raises `CheckpointError`, with everything as it was, unless all of it fits."""
        refuse(self.faults(tree))
        before, streams = stage(self._to_put_back()), read_streams()
        try:
            self._load(tree)
            set_streams(tree["streams"])
        except BaseException as error:
            before.wait()
            self._load(before.tree)
            set_streams(streams)
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(
                f"the checkpoint does not fit this run: {type(error).__name__}: {str(error).rstrip('.')}. Nothing was "
                "loaded. Build the run as it was when it was saved, or start in another folder."
            ) from error
        self._find_place(tree)

    def faults(self, tree: Any) -> list[str]:
        """Why a state cannot be loaded; changes nothing."""
        try:
            return self._faults(tree)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            return [f"it is not a state that a TrainingStabilizer saved ({type(error).__name__}: {error})"]

    def _faults(self, tree: dict[str, Any]) -> list[str]:
        parts = self._parts
        expected = ("models", "optimizer", "scheduler", "also", "stabilizer", "streams", "data")
        if missing := [part for part in expected if part not in tree]:
            return [f"it has no part {part!r}" for part in missing]
        if len(parts.models) != len(tree["models"]):
            return [f"it holds {len(tree['models'])} models, and the run has {len(parts.models)}"]
        then = tree.get("described")
        if then is None:
            log.warning(
                "surefoot: the checkpoint was saved by a version that did not save the names of parameters: that each "
                "moment belongs to the parameter at its position is taken for granted, and only shapes are compared."
            )
        described, then = then is not None, then or {"optimizer": None, "scheduler": None, "also": {}}
        faults = [
            fault
            for model, saved in zip(parts.models, tree["models"], strict=True)
            for fault in model_faults(model, saved)
        ]
        faults += optimizer_faults(parts.optimizer, tree["optimizer"], then["optimizer"], parts.models)
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
        if hasattr(thing, "_persistence"):
            return list(thing._persistence.faults(saved))
        if isinstance(thing, torch.optim.Optimizer):
            return optimizer_faults(thing, saved, then, self._modules)
        return _scheduler_faults(thing, then) if _is_scheduler(thing) and then is not None else []

    def _to_put_back(self) -> dict[str, Any]:
        """What `_load` is given when it failed before: the state of all that surefoot and torch know how to read.

        Reading the state of other things may change them (torchdata's loader begins to iterate).
        """
        parts, also = self._parts, dict[str, Any]()
        for name, thing in parts.also.items():
            if hasattr(thing, "_persistence"):
                also[name] = thing._persistence._to_put_back()
            elif isinstance(thing, (torch.nn.Module, torch.optim.Optimizer)) or _is_scheduler(thing):
                also[name] = thing.state_dict()
        return {
            "models": [model.state_dict() for model in parts.models],
            "optimizer": parts.optimizer.state_dict(),
            "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
            "also": also,
            "stabilizer": parts.own.settle(parts.own.read()),
        }

    def _load(self, tree: dict[str, Any]) -> None:
        """Load all but the place in the data and the random streams."""
        parts = self._parts
        load_models(parts.models, tree["models"])
        load_optimizer(parts.optimizer, tree["optimizer"])
        if parts.scheduler is not None and tree["scheduler"] is not None:
            parts.scheduler.load_state_dict(tree["scheduler"])
        for name, thing in parts.also.items():
            if hasattr(thing, "_persistence") and name in tree["also"]:
                thing._persistence._load(tree["also"][name])
            elif name in tree["also"] and isinstance(thing, torch.optim.Optimizer):
                load_optimizer(thing, tree["also"][name])
            elif name in tree["also"]:
                thing.load_state_dict(tree["also"][name])
        parts.own.load(tree["stabilizer"])

    def _find_place(self, tree: dict[str, Any]) -> None:
        """Find the place in the data again; the random streams are put back with it, by `_put_streams_back`."""
        for name, thing in self._parts.also.items():
            if name not in tree["also"]:
                log.warning("surefoot: the checkpoint has no %r; it starts anew.", name)
            elif hasattr(thing, "_persistence"):
                thing._persistence._find_place(tree["also"][name])
        self.position.load_state_dict(tree["data"])
        self._streams = tree["streams"]

    @property
    def _modules(self) -> list[nn.Module]:
        """All modules whose parameters have names."""
        also = [thing for thing in self._parts.also.values() if isinstance(thing, torch.nn.Module)]
        return [*self._parts.models, *also]

    def _described(self) -> dict[str, Any]:
        """What a saved state must be compared with before it is loaded."""
        parts = self._parts
        also: dict[str, Any] = {}
        for name, thing in parts.also.items():
            if isinstance(thing, torch.optim.Optimizer):
                also[name] = describe_optimizer(thing, self._modules)
            elif _is_scheduler(thing):
                also[name] = scheduler_kind(thing)
        optimizer = describe_optimizer(parts.optimizer, parts.models)
        return {"optimizer": optimizer, "scheduler": scheduler_kind(parts.scheduler), "also": also}

    def follow(self, loader: Any, epochs: int) -> Followed:
        """The batches that are left, from where the run stopped."""
        self.restore_once()
        batches = self.position.follow(loader, epochs=epochs, after_positioning=self._put_streams_back)
        return Followed(batches, self)

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs that are left."""
        self.restore_once()
        return self._heard_epochs(self.position.epochs(total, after_positioning=self._put_streams_back))

    def _heard_epochs(self, numbers: Iterator[int]) -> Iterator[int]:
        with self.interrupts.installed():
            for number in numbers:
                self._on_stop_point()  # a signal that came after the last step of the epoch before
                yield number
            self._on_stop_point()

    def _put_streams_back(self) -> None:
        """The data are back in place: so are the random numbers from here on."""
        if self._streams is not None:
            set_streams(self._streams)
            self._streams = None


class Followed:
    """Batches of a loader; signals are heard while they are drawn, and none is drawn after one."""

    def __init__(self, batches: Any, lifeline: RunPersistence) -> None:
        self._batches, self._persistence = batches, lifeline

    def __iter__(self) -> Iterator[Any]:
        with self._persistence.interrupts.installed():
            try:
                yield from _Drawn(iter(self._batches), self._persistence)
            finally:
                self._persistence.after_draws()

    def __len__(self) -> int:
        return len(self._batches)


class _Drawn:
    """The iterator: before each batch is a moment to save and to stop."""

    def __init__(self, batches: Iterator[Any], lifeline: RunPersistence) -> None:
        self._batches, self._persistence = batches, lifeline

    def __iter__(self) -> _Drawn:
        return self

    def __next__(self) -> Any:
        between = self._persistence.before_draw()
        try:
            batch = self._persistence.draw(self._batches, between)
        except StopIteration:
            self._persistence.stop_here()  # at the end of the data there may be no step to come
            raise
        except Exception:
            self._persistence.stop_here()  # the signal may have ended what loads the data
            raise
        self._persistence.drew(batch)
        return batch


def _unchecked(parts: RunParts) -> set[str]:
    names = [*UNCHECKED]
    names += [f"models.{i}.{name}" for i, model in enumerate(parts.models) for name in infinite_buffers(model)]
    for key, thing in parts.also.items():
        if isinstance(thing, torch.nn.Module):
            names += [f"also.{key}.{name}" for name in infinite_buffers(thing)]
        elif hasattr(thing, "_persistence"):
            names += [f"also.{key}.{name}" for name in thing._persistence.unchecked]
    return set(names)


def full_state(thing: Any) -> Any:
    """Everything of a thing: of another stabilizer its model and optimizer too."""
    return thing._persistence.gather() if hasattr(thing, "_persistence") else thing.state_dict()


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


def _place_for(tree: Any) -> Place:
    """On the device if there is plenty of room, else in pinned host memory."""
    free = free_bytes()
    return "device" if free is None or free >= ROOM * bytes_of(tree) else "pinned"
