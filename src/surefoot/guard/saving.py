"""Saves a run: a checkpoint is copied at its step, and written when the result of that step is known.

A checkpoint is taken between two batches: what the loop does after `step()` with a batch (an average of the weights,
the other model of a GAN) belongs to it. So a due save waits until the next batch is requested. If batches are not drawn
from `resume`, or one batch takes several steps, it is made at the end of the step.

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
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

from surefoot.core.device import free_bytes
from surefoot.decide.agreement import copies_of_first
from surefoot.errors import CheckpointError, UsageError
from surefoot.keep.position.workers import worker_died
from surefoot.keep.replicated_state import leave_out_copies
from surefoot.keep.staging import Place, Staged, stage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from surefoot.decide.agreement import Ranks
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

    def before_update(self) -> None:
        """Called before the optimizer writes: complete copies that are in progress."""
        if self._checkpoints is None:
            return
        self._checkpoints.check_owner(self._owner)
        self._due = None  # no further batch was requested; the save is still due after this step
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

    def forget_due(self) -> None:
        """The run continues from a checkpoint: nothing is due."""
        self._due = None

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
        self._due = None
        self._write_known(due.step)

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
        self._due = None
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
