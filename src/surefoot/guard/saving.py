"""Saving a run: a checkpoint is copied at the step it belongs to, and written once the result of that step is known.

The moment that a checkpoint is of lies between two batches: what the loop does after `step()` with a batch (an average
of the weights, the other model of a GAN) belongs to it. So a save that is due waits until the next batch is requested.
Where batches are not drawn from `resume`, or one of them takes several steps, it is made at the end of the step.

On a GPU the result of a step is known a few steps later: by then the copy is complete and reading it waits for nothing.
A loop that ends before has no further step: what is copied is written before a run is restored, and at exit.

There are never more than two copies: one that is being written, and one that waits. Where batches are drawn from
`resume`, it waits here, and is handed over at a later step or at the end of the loop. Elsewhere there may be no such
moment: it waits in the writer, and a newer one takes its place.
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
"""How many times the size of a state must be free on a GPU for it to be staged there."""


@dataclass(frozen=True)
class _DueSave:
    """A checkpoint that is due."""

    step: int
    instability: Callable[[], tuple[str, ...]]
    metric: Callable[[], float | None]


@dataclass(frozen=True)
class _Waiting:
    """A checkpoint that is staged, and waits for the result of its step."""

    due: _DueSave
    staged: Staged
    is_final: bool = False
    """Whether the result is known, and the copy waits for the writer."""

    def final(self) -> _Waiting:
        """The same with the result as it is now, whatever comes later."""
        if self.is_final:
            return self
        instability, metric = self.due.instability(), self.due.metric()
        return _Waiting(_DueSave(self.due.step, lambda: instability, lambda: metric), self.staged, is_final=True)


_ALONE: WeakSet[CheckpointSaver] = WeakSet()
"""Those of this process that save without others."""


@atexit.register
def write_copies(folder: Path | None = None) -> None:
    """Write what was copied and is not written yet: into a folder that is about to be read, or all of it."""
    for saver in list(_ALONE):
        try:
            if folder is None or saver.saves_into(folder):
                saver.write_rest()
        except Exception as error:
            log.warning("surefoot: a scheduled checkpoint could not be written: %s", error)


class SaveSession:
    """What the ranks of a run have in common between two restarts: parts of two sessions are not combined."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.name: str | None = None
        """`None` for a process that trains alone, and until `begin`."""

    def begin(self) -> None:
        """The run begins, or continues from a checkpoint. Every rank must call."""
        if self._ranks.several:
            self.name = f"{self._ranks.of_first(int.from_bytes(os.urandom(7), 'big')):014x}"


class CheckpointSaver:
    """Saves a run, when it is due and on request."""

    def __init__(
        self, run_state: RunState, checkpoints: CheckpointManager | None, lag_steps: int, ranks: Ranks, owner: object
    ) -> None:
        """Save the run of `owner`, which alone may use `checkpoints`."""
        self._run_state, self._checkpoints, self._lag, self._owner = run_state, checkpoints, lag_steps, owner
        self.session = SaveSession(ranks)
        if checkpoints is not None:
            checkpoints.belong_to(owner)
            if checkpoints.world_size == 1:  # several processes could not agree on it at exit
                _ALONE.add(self)
        self._copies_first = (
            checkpoints is not None
            and ranks.place > 0
            # Those that train together are those that save together: the first of them is rank 0 of the parts.
            and (checkpoints.rank, checkpoints.world_size) == (ranks.place, ranks.count)
            and copies_of_first(run_state.parts.models, run_state.parts.optimizer)
        )
        self._waiting: deque[_Waiting] = deque()
        self._followed = False  # whether the last step was on a batch from `resume`
        self._due: _DueSave | None = None

    def before_update(self) -> None:
        """Called before the optimizer writes: copies in progress must be complete by then."""
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
                    return  # what waits is better; this stays due
                self._checkpoints.drop_next()
            self._due = _DueSave(step, instability, metric)
            if not waits_for_batch:
                self.copy_due()

    def forget_copies(self) -> None:
        """The run has returned to earlier weights: what was copied since is not written."""
        self._waiting.clear()

    def forget_due(self) -> None:
        """The run continues from a checkpoint: nothing is due."""
        self._due = None

    def finish(self) -> Exception | None:
        """No more batches are requested, and there may be no further step: write what is due.

        Returns the error of a data loader's worker that died meanwhile: torch raises it wherever the program happens
        to be.
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
        self._waiting.append(_Waiting(due, self._staged()))
        self._due = None
        self._write_known(due.step)

    def saves_into(self, folder: Path) -> bool:
        """Whether checkpoints go into this folder."""
        return self._checkpoints is not None and self._checkpoints.folder.absolute() == folder.absolute()

    def write_rest(self) -> None:
        """Write what is copied: there may be no further step."""
        while self._waiting and self._checkpoints is not None:
            self._checkpoints.wait()
            self._write_first()

    def _write_known(self, step: int) -> None:
        """Write the copies whose steps' results are known, or let them wait for the one that is being written.

        The result of one that has to wait is fixed now. Later the run may be quiet again, and the copy would count as
        good.
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
            if worker_died(error):  # that has nothing to do with the save: it is made when the loop is left
                self._waiting.appendleft(waiting)
            raise

    def _staged(self) -> Staged:
        tree = self._run_state.gather()
        if self._copies_first:
            leave_out_copies(tree, self._run_state.parts.models)
        return stage(tree, _place_for)

    def _write(self, waiting: _Waiting, metric_given: bool = False, blocking: bool = False) -> bool:
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
        """Save now, and come back when it is written. Raises `CheckpointError` if it cannot be."""
        if self._checkpoints is None:
            raise UsageError(
                "there is no checkpoint folder: pass `checkpoints=CheckpointManager(folder)` to the stabilizer."
            )
        self._checkpoints.check_owner(self._owner)
        self._waiting.clear()
        self._due = None
        due = _DueSave(step, lambda: instability, lambda: metric)
        if not self._write(_Waiting(due, self._staged()), metric_given=given, blocking=True):
            error = self._checkpoints.last_error
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self._checkpoints.folder}: "
                f"{error or type(error).__name__}. {self._checkpoints.newest_good_age(step)} Free disk space or repair "
                "the folder, then call `save()` again. The run is not affected."
            ) from error

    def save_evidence(self, step: int, reason: str) -> Path | None:
        """Save a run that is about to halt; returns the folder, or `None` if there is none to save to."""
        if self._checkpoints is None:
            return None
        try:
            self.save(step, (reason,), None)
        except CheckpointError as error:  # why the run halts matters more
            log.error("surefoot: %s", error)
            return None
        return next((found.path for found in self._checkpoints.checkpoints() if found.step == step), None)


def _place_for(size: int) -> Place:
    """On the device if it has enough free memory for this many bytes, otherwise in pinned host memory."""
    free = free_bytes()
    return "device" if free is None or free >= ROOM * size else "pinned"
