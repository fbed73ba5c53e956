"""The data of a run: the remaining batches, the position in them, stop signals, and the saves between two batches.

Before each batch that is drawn from `resume`, the run can save and stop. A signal that arrives while the run waits for
the next batch is handled immediately, as if it had arrived before.

A checkpoint is copied at its step, and written when the result of that step is known. It is taken between two batches:
what the loop does after `step()` with a batch (an average of the weights, the other model of a GAN) belongs to it. So a
due save waits until the next batch is requested. If batches are not drawn from `resume`, or one batch takes several
steps, it is made at the end of the step.

On a GPU the result of a step is known a few steps later: by then the copy is complete, and reading it does not wait. If
the loop ends earlier, there is no further step: the copy is written before a run is restored, and at exit.

There are never more than two copies: one that is being written, and one that waits. If batches are drawn from `resume`,
it waits here, and is handed over at a later step or at the end of the loop. Otherwise there may be no such moment: it
waits in the writer, and a newer one replaces it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from surefoot.core.device import free_bytes
from surefoot.core.random_state import set_streams
from surefoot.decide.agreement import copies_of_first
from surefoot.errors import CheckpointError, UsageError
from surefoot.keep.dead_workers import WorkerErrors
from surefoot.keep.position.workers import worker_died
from surefoot.keep.replicated_state import leave_out_copies
from surefoot.keep.staging import Place, Staged, stage
from surefoot.keep.stop_signals import StopSignals, StopWaiting
from surefoot.record.incidents.step_capture import QuickStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from surefoot.decide.agreement import Ranks
    from surefoot.guard.repeating import Repeats
    from surefoot.guard.run_state import RunState
    from surefoot.keep.checkpoint.manager import CheckpointManager


log = logging.getLogger("surefoot")

ROOM = 1.5
"""The multiple of a state's size that must be free on a GPU for it to be staged there."""


@dataclass(frozen=True)
class _DueSave:
    """A checkpoint that is due."""

    step: int
    instability: Callable[[], tuple[str, ...]]
    metric: Callable[[], float | None]


@dataclass(frozen=True)
class _StagedSave:
    """A staged checkpoint that waits for the result of its step."""

    due: _DueSave
    staged: Staged
    is_final: bool = False
    """Whether the result is known, and the copy waits for the writer."""

    def final(self) -> _StagedSave:
        """The same with the current result fixed."""
        if self.is_final:
            return self
        instability, metric = self.due.instability(), self.due.metric()
        return _StagedSave(_DueSave(self.due.step, lambda: instability, lambda: metric), self.staged, is_final=True)


_ALONE: WeakSet[CheckpointSaver] = WeakSet()
"""The savers of this process that save alone."""


@atexit.register
def write_copies(folder: Path | None = None) -> None:
    """Write the copies that are not written yet: those for a folder that is about to be read, or all."""
    for saver in list(_ALONE):
        try:
            if folder is None or saver.saves_into(folder):
                saver.write_rest()
        except Exception as error:
            log.warning("surefoot: a scheduled checkpoint could not be written: %s", error)


class SaveSession:
    """A common identifier of the ranks between two restarts: parts of different sessions are not combined."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.name: str | None = None
        """`None` in a process that trains alone, and before `begin`."""

    def begin(self) -> None:
        """Start a session when the run begins or continues from a checkpoint. Every rank must call this."""
        if self._ranks.several:
            self.name = f"{self._ranks.of_first(int.from_bytes(os.urandom(7), 'big')):014x}"


class CheckpointSaver:
    """Saves a run when it is due, and on request."""

    def __init__(
        self, run_state: RunState, checkpoints: CheckpointManager | None, lag_steps: int, ranks: Ranks, owner: object
    ) -> None:
        """Save the run of `owner`, which must be the only user of `checkpoints`."""
        self._run_state, self._checkpoints, self._lag, self._owner = run_state, checkpoints, lag_steps, owner
        self.session = SaveSession(ranks)
        if checkpoints is not None:
            checkpoints.belong_to(owner)
            if checkpoints.world_size == 1:  # several processes could not agree at exit
                _ALONE.add(self)
        self._copies_first = (
            checkpoints is not None
            and ranks.place > 0
            # The ranks that train together also save together: the first of them is rank 0 of the parts.
            and (checkpoints.rank, checkpoints.world_size) == (ranks.place, ranks.count)
            and copies_of_first(run_state.parts.models, run_state.parts.optimizer)
        )
        self._waiting: deque[_StagedSave] = deque()
        self._followed = False  # whether the last step was on a batch from `resume`
        self._due: _DueSave | None = None
        self._copied: _DueSave | None = None  # the last save that was copied, if no step was taken since

    def before_update(self) -> None:
        """Called before the optimizer writes: complete copies that are in progress."""
        if self._checkpoints is None:
            return
        self._checkpoints.check_owner(self._owner)
        self._due = self._copied = None  # if no further batch was requested, the save is still due after this step
        for waiting in self._waiting:
            waiting.staged.hold_updates()

    def after_step(
        self,
        step: int,
        instability: Callable[[], tuple[str, ...]],
        metric: Callable[[], float | None],
        *,
        waits_for_batch: bool,
    ) -> None:
        """`step` optimizer steps are done: copy what is due, now or before the next batch is drawn."""
        if self._checkpoints is None:
            return
        self._followed = waits_for_batch
        self._write_known(step)
        if not self._waiting and self._checkpoints.due(step):
            if self._checkpoints.has_next:
                if instability():
                    return  # the waiting copy is better; this one stays due
                self._checkpoints.drop_next()
            self._due = _DueSave(step, instability, metric)
            if not waits_for_batch:
                self.copy_due()

    def forget_copies(self) -> None:
        """The run has returned to earlier weights: drop the copies made since."""
        self._waiting.clear()
        self._copied = None

    def forget_due(self) -> None:
        """The run continues from a checkpoint: nothing is due."""
        self._due = self._copied = None

    def finish(self) -> Exception | None:
        """No more batches are requested, and there may be no further step: write what is due.

        Returns the error of a data loader's worker that died in the meantime, which torch raises at any point of the
        program.
        """
        died: Exception | None = None
        while self._due is not None or self._waiting:
            try:
                self.copy_due()
                self.write_rest()
            except Exception as error:
                if not worker_died(error):
                    raise
                died = error
        return died

    def copy_due(self) -> None:
        """Copy what is due."""
        due = self._due
        if due is None:
            return
        self._waiting.append(_StagedSave(due, self._staged()))
        self._due, self._copied = None, due
        self._write_known(due.step)

    def copy_again(self) -> None:
        """A new epoch begins: save again what was saved after the last batch of the pass before.

        The work between the passes is done, so a restart must not do it again. Until now it had to.
        """
        if self._copied is not None:
            self._due, self._copied = self._copied, None
            self._waiting = deque(each for each in self._waiting if each.due.step != self._due.step)
            self.copy_due()

    def saves_into(self, folder: Path) -> bool:
        """Whether checkpoints are written into this folder."""
        return self._checkpoints is not None and self._checkpoints.folder.absolute() == folder.absolute()

    def write_rest(self) -> None:
        """Write the copies: there may be no further step."""
        while self._waiting and self._checkpoints is not None:
            self._checkpoints.wait()
            self._write_first()

    def _write_known(self, step: int) -> None:
        """Write the copies whose steps have a result, or let them wait for the one that is being written.

        The result of a waiting copy is fixed now. Otherwise the run could become quiet later, and the copy would count
        as good.
        """
        assert self._checkpoints is not None
        while self._waiting and self._waiting[0].due.step + self._lag <= step:
            if self._followed and self._checkpoints.busy:
                self._waiting[0] = self._waiting[0].final()
                return
            self._write_first()

    def _write_first(self) -> None:
        waiting = self._waiting.popleft()
        try:
            self._write(waiting)
        except Exception as error:
            if worker_died(error):  # unrelated to the save, which is made at the end of the loop
                self._waiting.appendleft(waiting)
            raise

    def _staged(self) -> Staged:
        tree = self._run_state.gather()
        if self._copies_first:
            leave_out_copies(tree, self._run_state.parts.models)
        return stage(tree, _place_for)

    def _write(self, waiting: _StagedSave, metric_given: bool = False, blocking: bool = False) -> bool:
        assert self._checkpoints is not None
        tree, instability = waiting.staged.tree, waiting.due.instability()
        self._run_state.settle(tree)
        return self._checkpoints.save(
            tree,
            waiting.due.step,
            quiet=not instability,
            reasons=instability,
            metric=waiting.due.metric(),
            metric_given=metric_given,
            unchecked=self._run_state.unchecked,
            staged=waiting.staged,
            blocking=blocking,
            after_busy=True,
            session=self.session.name,
        )

    def save(self, step: int, instability: tuple[str, ...], metric: float | None, given: bool = False) -> None:
        """Save now, and return when it is written. Raises `CheckpointError` on failure."""
        if self._checkpoints is None:
            raise UsageError(
                "there is no checkpoint folder: pass `checkpoints=CheckpointManager(folder)` to the stabilizer."
            )
        self._checkpoints.check_owner(self._owner)
        self._waiting.clear()
        self._due = self._copied = None
        due = _DueSave(step, lambda: instability, lambda: metric)
        if not self._write(_StagedSave(due, self._staged()), metric_given=given, blocking=True):
            error = self._checkpoints.last_error
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self._checkpoints.folder}: "
                f"{error or type(error).__name__}. {self._checkpoints.newest_good_age(step)} Free disk space or repair "
                "the folder, then call `save()` again. The run is not affected."
            ) from error

    def save_evidence(self, step: int, reason: str) -> Path | None:
        """Save a run that is about to halt; returns the folder, or `None` if there is no checkpoint folder."""
        if self._checkpoints is None:
            return None
        try:
            self.save(step, (reason,), None)
        except CheckpointError as error:  # the reason why the run halts is more important
            log.error("surefoot: %s", error)
            return None
        return next((found.path for found in self._checkpoints.checkpoints() if found.step == step), None)


def _place_for(size: int) -> Place:
    """On the device if it has enough free memory for this many bytes, otherwise in pinned host memory."""
    free = free_bytes()
    return "device" if free is None or free >= ROOM * size else "pinned"


@dataclass(frozen=True)
class LoopHooks:
    """The functions that a run calls during its loop."""

    on_draw: Callable[[Any], None] | None
    """Called with each batch that was drawn from `resume`."""
    on_stop_point: Callable[[], None]
    """Called where the run can stop; saves and exits if requested."""
    on_failed_draw: Callable[[Exception], None]
    """Called with the error of a data loader, when all steps are complete."""
    on_begin: Callable[[], Callable[[int], None]]
    """Called before the first batch of a loop; the function that it returns is called at the end of the data."""
    on_resume: Callable[[int, Path], None] | None
    """Called with the step and the folder when the run continues from a checkpoint."""
    leave_out: Callable[[], None]
    """Counts the next step as left out of a repeat. Its batches were drawn."""
    on_back: Callable[[int], None] | None
    """Called with the step that the run has returned to; the steps after it are repeated."""
    microbatches: Callable[[], int]
    """The number of batches per step; another number of ranks may change it."""


class DrawnWindows:
    """Records which iterators drew a batch for each step."""

    def __init__(self) -> None:
        self.steps = 0
        """The number of steps taken on the batches of the current window."""
        self._last_steps = 0
        self._drawn: list[weakref.ref[DrawnBatches]] = []
        self._last: list[weakref.ref[DrawnBatches]] = []

    def drew(self, drawn: DrawnBatches) -> None:
        """One of the iterators is about to draw a batch."""
        self._drawn.append(weakref.ref(drawn))

    def close(self) -> None:
        """End the window: the next batch belongs to another step."""
        # At the end of the data a window may be short.
        if len(self._drawn) >= len(self._last) or any(each() is None for each in self._last):
            self._last = self._drawn
        self._last_steps = self.steps if self._drawn else 0
        self._drawn, self.steps = [], 0

    def drawn_by(self) -> list[DrawnBatches]:
        """The iterators that drew the batches of a complete window, in order; empty before the first one."""
        return [drawn for reference in self._last if (drawn := reference()) is not None]

    @property
    def have_one_step_each(self) -> bool:
        """Whether each step has its own batches, so that a step can be left out with them. Called inside a step."""
        return self.steps == 0 and self._last_steps in (0, 1)


class DataLoop:
    """Follows the loaders of a run."""

    def __init__(
        self,
        run_state: RunState,
        saver: CheckpointSaver,
        checkpoints: CheckpointManager | None,
        loop: LoopHooks,
        several_ranks: bool,
        repeats: Repeats | None,
    ) -> None:
        """Start to follow loaders.

        Args:
            run_state: has the position in the data.
            saver: saves due checkpoints between two batches.
            checkpoints: define the signals that stop a run.
            loop: the functions called during the loop.
            several_ranks: whether other processes train with this one, which must stop together.
            repeats: returns to an earlier moment between two batches, and decides which steps are left out.
        """
        self.hooks, self._repeats = loop, repeats
        self.windows = DrawnWindows()
        self._run_state, self._saver, self._several_ranks = run_state, saver, several_ranks
        self._quick_streams = QuickStreams() if checkpoints is not None else None
        self.interrupts = StopSignals(checkpoints.signals if checkpoints else ())
        self._drawer: int | None = None  # the thread that draws batches
        self._stepper: int | None = None  # the thread that trains
        self._drawn = False
        self._worker_errors = WorkerErrors()

    def follow(self, loader: Any, epochs: int) -> FollowedBatches:
        """The remaining batches, from where the run stopped."""
        put_back = self._run_state.restore_streams
        return FollowedBatches(self._run_state.position.follow(loader, epochs=epochs, after_positioning=put_back), self)

    def epochs(self, total: int) -> Iterator[int]:
        """The remaining epochs."""
        numbers = self._run_state.position.epochs(total, after_positioning=self._run_state.restore_streams)
        return self._epochs_until_stopped(numbers)

    def _epochs_until_stopped(self, numbers: Iterator[int]) -> Iterator[int]:
        with self.interrupts.installed():
            for number in numbers:
                self._saver.copy_again()
                self.hooks.on_stop_point()  # a signal that arrived after the last step of the previous epoch
                yield number
            self.hooks.on_stop_point()

    @property
    def between_batches_soon(self) -> bool:
        """Whether this was the first step since a batch was drawn from `resume`, so that the next batch may follow."""
        return self._drawn and self._drawer == threading.get_ident()

    def step_over(self) -> None:
        """The current step and everything that it requires is complete."""
        self._drawn, self._stepper = False, threading.get_ident()
        self.windows.steps += 1

    def before_draw(self, drawn: DrawnBatches) -> bool:
        """The next batch is requested; returns whether this is between two steps."""
        between = not self._drawn  # with two loaders in parallel, before the first of the two
        if between:
            self._between_batches()
        self._drawer, self._drawn = threading.get_ident(), True
        self.windows.drew(drawn)
        return between

    def _between_batches(self) -> None:
        self.windows.close()
        if self._repeats is not None and self._stepper in (None, threading.get_ident()):
            self._repeats.go_back()
        self.stop_here()
        if self._repeats is not None and self._stepper in (None, threading.get_ident()):
            self._repeats.take_moment()

    def leave_out_steps(self, drawn: DrawnBatches) -> None:
        """Draw the batches of steps that are left out, without training on them, before the next batch is drawn.

        Raises `StopIteration` at the end of the data.
        """
        repeats = self._repeats
        while repeats is not None and self._stepper in (None, threading.get_ident()) and repeats.leaves_out_next():
            left = 0
            try:
                for owner in self.windows.drawn_by() or [drawn] * self.hooks.microbatches():
                    self.draw(owner.batches, between=False)
                    left += 1
            finally:
                if left:
                    self.hooks.leave_out()
            self.before_draw(drawn)

    def why_not_repeated(self) -> str | None:
        """Why steps cannot be repeated as the loop draws its batches; `None` if they can."""
        if self._drawer is None:
            return "batches are not drawn from `stabilizer.resume(loader)`"
        if self._drawer != threading.get_ident():
            return "batches are drawn in a different thread from the one that trains"
        return None

    def draw(self, batches: Iterator[Any], between: bool) -> Any:
        """The next batch. A stop signal that arrives while waiting for it is handled as if it had arrived before."""
        if not (between and self._may_stop_waiting):
            return self._worker_errors.draw(batches, between)
        assert self._quick_streams is not None
        mark, streams = self._run_state.position.mark(), self._quick_streams.note()
        try:
            try:
                self.interrupts.begin_waiting()
                return self._worker_errors.draw(batches, between)
            finally:
                self.interrupts.end_waiting()
        except StopIteration:
            raise
        except StopWaiting:
            if self._run_state.position.back_to(mark):
                set_streams(streams.full())
            self.stop_here()
            raise
        except Exception as error:
            failed_at, drawn = self._run_state.position.mark(), self._quick_streams.note()
            try:
                if self._run_state.position.back_to(mark):
                    set_streams(streams.full())
                    self.hooks.on_failed_draw(error)
            finally:  # after the error of a loader, the program continues as it would without a save
                self._run_state.position.back_to(failed_at)
                set_streams(drawn.full())
            raise

    @property
    def _may_stop_waiting(self) -> bool:
        """Whether a signal may interrupt the wait for a batch: not on one rank alone, for which the others wait."""
        if self._quick_streams is None or self._several_ranks or self._stepper not in (None, threading.get_ident()):
            return False
        return threading.current_thread() is threading.main_thread() and self._run_state.position.can_mark

    @property
    def is_before_saved_position(self) -> bool:
        """Whether the position where the run stopped has not been reached: this pass was already complete."""
        return self._run_state.position.pending

    def stop_here(self) -> None:
        """Save what is due, and stop if requested, unless this thread draws ahead of the training thread."""
        if self._stepper in (None, threading.get_ident()):
            self._saver.copy_due()
            self.hooks.on_stop_point()

    def after_draws(self) -> None:
        """No more batches are requested, and there may be no further step: write what is due."""
        if self._drawer != threading.get_ident():
            return
        died = self._saver.finish()
        self._worker_errors.close()
        self._drawer = None
        if died is not None:
            raise died


class FollowedBatches:
    """The batches of a loader. While they are drawn, stop signals are received, and no batch is drawn after one."""

    def __init__(self, batches: Any, loop: DataLoop) -> None:
        self._batches, self._loop = batches, loop

    def __iter__(self) -> Iterator[Any]:
        with self._loop.interrupts.installed():
            try:
                yield from DrawnBatches(iter(self._batches), self._loop)
            finally:
                self._loop.after_draws()

    def __len__(self) -> int:
        return len(self._batches)


class DrawnBatches:
    """The iterator: the run may save and stop before each batch."""

    def __init__(self, batches: Iterator[Any], loop: DataLoop) -> None:
        self.batches, self._loop = batches, loop
        self._drawn, self._on_end = 0, loop.hooks.on_begin()

    def __iter__(self) -> DrawnBatches:
        return self

    def __next__(self) -> Any:
        between = self._loop.before_draw(self)
        try:
            if between:
                self._loop.leave_out_steps(self)
            batch = self._loop.draw(self.batches, between)
        except StopIteration:
            if not self._loop.is_before_saved_position:
                self._on_end(self._drawn)
            self._loop.stop_here()  # at the end of the data, there may be no further step
            raise
        except Exception:
            self._loop.stop_here()  # the signal may have killed the loader's workers
            raise
        self._drawn += 1
        if self._loop.hooks.on_draw is not None:
            self._loop.hooks.on_draw(batch)
        return batch
