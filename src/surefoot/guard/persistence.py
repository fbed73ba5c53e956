"""Everything of a run that outlives a step: snapshots in memory, checkpoints on disk, the data position, and signals.

`RunPersistence` connects five parts and decides nothing itself:

- `RunState` reads and loads the whole run as one state;
- `CheckpointSaver` saves it;
- `EarlierWeights` returns to earlier *weights*, optimizer state and rule states, from snapshots in memory or
  checkpoints: the run continues with the next data, its schedule and its learning rates;
- `Repeats`, if enabled, returns to an earlier *moment* instead, and the run repeats the steps since;
- `DataLoop` follows the data and the signals, so that `restore` returns to an earlier *moment*: everything, including
  random streams and the data position, as in a run that was never stopped.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from surefoot.core.console import print_if_not_logged
from surefoot.core.random_state import read_streams
from surefoot.core.settings import is_whole, shown
from surefoot.core.wording import count_of
from surefoot.errors import CheckpointError, UsageError, require
from surefoot.guard.data_loop import CheckpointSaver, DataLoop, write_copies
from surefoot.guard.repeating import Repeats
from surefoot.guard.run_state import is_stabilizer, run_state_of
from surefoot.keep.checkpoint.selection import NONE, CheckpointSelector
from surefoot.keep.checkpoint.shards import whole_tensors
from surefoot.keep.resharding import placed_like, placed_model, placed_optimizer, streams_for_new_rank
from surefoot.keep.restore import load_models, load_moments, refuse
from surefoot.keep.snapshots import SnapshotRing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from surefoot.decide.agreement import Ranks
    from surefoot.decide.raised_rate import RateWatch, StepRates
    from surefoot.decide.recovery import TrainingRecovery
    from surefoot.guard.data_loop import FollowedBatches, LoopHooks
    from surefoot.guard.run_history import RunHistory
    from surefoot.guard.run_state import RunState, RunTree, StabilizerState
    from surefoot.guard.step_results import StepResults
    from surefoot.keep.checkpoint.manager import CheckpointManager
    from surefoot.keep.checkpoint.parts import SavedParts
    from surefoot.keep.restore import OptimizerState
    from surefoot.keep.snapshots import TrainedState
    from surefoot.keep.weight_movement import Typical
    from surefoot.types import Decision, StepRecord


log = logging.getLogger("surefoot")


class EarlierWeights:
    """Takes snapshots of a run, and restores earlier weights."""

    def __init__(
        self,
        run_state: RunState | None,
        trained: TrainedState,
        checkpoints: CheckpointManager | None,
        recovery: TrainingRecovery | None,
        ranks: Ranks,
        rates: RateWatch,
    ) -> None:
        """Start to take snapshots. `run_state` loads checkpoints, and is needed only with them."""
        self._run_state, self._trained, self._checkpoints = run_state, trained, checkpoints
        self._ranks, self._rates = ranks, rates
        self.selector = CheckpointSelector(checkpoints, ranks, partial(placed_parts, run_state) if run_state else None)
        self._margin, self._repeats = (recovery.margin_steps, recovery.repeat) if recovery else (0, False)
        self.ring = (
            SnapshotRing(trained, recovery.every_steps, recovery.keep, recovery.device_bytes) if recovery else None
        )

    def notice_rates(self, step: int, rates: StepRates | None, onset: int | None) -> None:
        """The step `step` is about to use these learning rates: if they are raised, copy the weights before it.

        With several ranks none is taken, because all must have the same ones. Nor with repeats: a moment is kept
        between two batches.
        """
        is_first = self._rates.before_step(step, rates)
        if self.ring is None or self._ranks.several:
            return
        self.ring.hold_before = self._rates.raised_at
        if is_first and onset is None and not self._repeats and self.ring.steps[-1:] != [step]:
            self.ring.take(step)
            self.ring.before_update()

    def after_step(self, step: int, onset: int | None, waits_for_batch: bool = False) -> None:
        """`step` optimizer steps are done: take a snapshot if one is due, unless that happens before the next batch.

        `onset` is the step at which the current problem began; `None` if the run is healthy.
        """
        if self.ring is None:
            return
        if onset is not None:
            self.ring.note_trouble(step, onset - self._margin)
        else:
            self.ring.settle()
            if not waits_for_batch:
                self.ring.take_if_due(step)
        self.ring.writes.after_step(step, self._trained.parameters())

    def report_jump(self, step: int, history: RunHistory) -> None:
        """Record an alarm if the weights moved much further between two snapshots than ever before.

        If neither the learning rate, the gradients nor a write of the script explain it, the next step returns. With
        several ranks it does not: each rank measures its own weights.
        """
        jump = self.ring.jumps.found(step) if self.ring is not None else None
        if self.ring is None or jump is None or not history.history or self.ring.writes.explain(jump.first, jump.last):
            return
        history.note(history.history[-1].signals, "weights.jump", "warning", str(jump))
        if not self._ranks.several and jump.is_unexplained(history.history):
            history.budgets.jumped_after = jump.first

    def weights_had_moved(self, typical: Typical, has_blown_up: bool) -> bool:
        """Whether the weights had moved further than training usually takes them, when the current problem began.

        If the run `has_blown_up`, what the script itself wrote to the weights is damage, too.
        """
        # If the steps are repeated, an unnecessary return costs nothing.
        return self.ring is None or self.ring.movement.was_unusual(
            typical, if_unknown=self._repeats, allows_writes=not has_blown_up
        )

    def returned(self, step: int) -> None:
        """After `step` steps the weights are those of an earlier state again: measure their movement from there."""
        if self.ring is not None:
            self.ring.movement.returned(step)

    def moved_since_return(self, step: int, typical: Typical) -> bool:
        """Whether the weights have moved further since the last return, up to `step`, than training takes them."""
        newest = self.ring.newest if self.ring is not None else None
        if self.ring is None or newest is None:
            return False
        return self.ring.movement.is_unusual_now(step, newest, typical)

    def return_to(self, before: int, tried: int, keep_present: bool) -> str | None:
        """Restore earlier weights; returns which ones, or `None` if there are none."""
        if self.ring is not None:
            step = self.ring.return_to(before, tried, keep_present)
            if step is not None:
                return f"the state before step {step}, kept in memory"
        in_memory = len(self.ring.steps) if self.ring is not None else 0
        for step, tree in self.good_checkpoints(before, max(tried - in_memory, 0)):
            if self.ring is not None and keep_present:
                self.ring.abandoned.keep()
            self.load_weights(tree)
            return f"the checkpoint of step {step}"
        return None

    def good_checkpoints(self, before: int, leave_out: int = 0) -> Iterator[tuple[int, RunTree]]:
        """Good checkpoints that are not newer than `before`, newest first, without the first `leave_out` of them.

        With several ranks, every rank must iterate over them in the same way.
        """
        if self._checkpoints is None or self._run_state is None:
            return
        self._checkpoints.wait()
        good = [found.step for found in self._checkpoints.checkpoints() if found.good and found.step <= before]
        candidates = iter(good[leave_out:])
        # Ranks may see different checkpoints, as parts are written at different times: the first rank's list is used.
        while (step := self._ranks.of_first(next(candidates, NONE))) != NONE:
            tree = self._loaded(step, self._run_state)
            if not self._ranks.any(tree is None):
                yield step, tree

    def load_weights(self, tree: RunTree) -> None:
        """Load weights, moments and rule states of a checkpoint, and what follows the weights; nothing else."""
        assert self._run_state is not None
        load_models(self._run_state.parts.models, tree["models"])
        load_moments(self._run_state.parts.optimizer, cast("OptimizerState", tree["optimizer"]))
        self._run_state.following.load_from(tree["also"])
        self._run_state.parts.own.load_rules(cast("StabilizerState", tree["stabilizer"]))

    def _loaded(self, step: int, run_state: RunState) -> Any:
        found = self.selector.load_here(step)
        if isinstance(found, Exception):
            log.warning("surefoot: cannot return to the checkpoint of step %d: %s", step, found)
            return None
        if found is None:
            return None
        if faults := run_state.faults(found.tree):
            log.warning("surefoot: cannot return to the checkpoint of step %d: %s", step, "; ".join(faults[:5]))
            return None
        return found.tree

    def forget_snapshots(self) -> None:
        """The run has new parameters: drop the snapshots, which no longer fit."""
        if self.ring is not None:
            self.ring.clear()

    def reset_moments(self) -> None:
        """Clear the moments of the optimizer."""
        self._trained.reset_moments()

    def take_back(self) -> bool:
        """Undo the last return."""
        return self.ring is not None and self.ring.abandoned.take_back()


class RunPersistence:
    """Snapshots, checkpoints, data position and signals of one run."""

    def __init__(
        self,
        run_state: RunState,
        trained: TrainedState,
        checkpoints: CheckpointManager | None,
        recovery: TrainingRecovery | None,
        lag_steps: int,
        ranks: Ranks,
        history: RunHistory,
        loop: LoopHooks,
    ) -> None:
        """Start to manage the run.

        Args:
            run_state: reads and loads the content of a checkpoint.
            trained: the content of a snapshot.
            checkpoints: where and how often to save.
            recovery: how often to take snapshots.
            lag_steps: how many steps later the result of a step is read.
            ranks: the processes that train together.
            history: has the budgets that decide which steps are repeated.
            loop: the functions called during the loop.
        """
        self.run_state, self.checkpoints, self._on_resume = run_state, checkpoints, loop.on_resume
        self._ranks = ranks
        self.saver = CheckpointSaver(run_state, checkpoints, lag_steps, ranks, owner=self)
        self.weights = EarlierWeights(run_state, trained, checkpoints, recovery, ranks, history.budgets.rates)
        self.repeats: Repeats | None = None
        """Repeats the steps that a return undoes, if this is enabled."""
        if recovery is not None and recovery.repeat:
            self.repeats = Repeats(self, history, ranks, loop.on_back)
        self.data = DataLoop(run_state, self.saver, checkpoints, loop, ranks.several, self.repeats)
        self._restored = self._has_stepped = False

    def before_update(self) -> None:
        """Called before the optimizer writes: complete copies that are in progress."""
        if not self._has_stepped:
            self._has_stepped = True
            self._warn_of_unused_checkpoints()
        self.saver.before_update()
        if self.weights.ring is not None:
            self.weights.ring.before_update()

    def after_step(self, step: int, history: RunHistory) -> None:
        """`step` optimizer steps are done: copy what is due, now or before the next batch is drawn."""
        waits_for_batch = self.data.between_batches_soon
        self.weights.after_step(step, history.onset, waits_for_batch and self.repeats is not None)
        self.weights.report_jump(step, history)
        if self.repeats is None or not self.repeats.is_returning:  # while returning, the state is a mix of two moments
            self.saver.after_step(step, history.instability, history.recent_loss, waits_for_batch=waits_for_batch)

    def return_to(self, before: int, tried: int, keep_present: bool) -> str | None:
        """Restore earlier weights; returns which ones, or `None` if there are none."""
        self.saver.forget_copies()
        return self.weights.return_to(before, tried, keep_present)

    def repeat_from(self, results: StepResults, record: StepRecord, decision: Decision) -> str | None:
        """Return to an earlier moment and repeat the steps since; returns its description, `None` if impossible."""
        return None if self.repeats is None else self.repeats.begin(results, record, decision)

    def undo_saves(self, step: int) -> None:
        """The run returns to `step`: mark checkpoints of later steps as evidence, and drop due saves."""
        self.saver.forget_copies()
        self.saver.forget_due()
        if self.checkpoints is not None:
            self.checkpoints.set_aside(step)

    def save_evidence(self, step: int, reason: str) -> Path | None:
        """Save a run that is about to halt; returns the folder, or `None` if there is no checkpoint folder."""
        return self.saver.save_evidence(step, reason)

    def restore(self, which: Any = "latest") -> int | None:
        """Continue from a checkpoint; returns its step, or `None` if there is none yet.

        The random streams are restored with the data position, or now if no loader is followed.
        """
        if self.checkpoints is None:
            raise UsageError(
                "there is no checkpoint folder: pass `checkpoints=CheckpointManager(folder)` to the stabilizer."
            )
        self.checkpoints.check_owner(self)
        self._restored = True
        if self.repeats is not None:
            self.repeats.forget()
        self.saver.forget_due()
        write_copies(self.checkpoints.folder)
        self.weights.selector.check_that_all_save()
        found = self.weights.selector.load(which)
        self.saver.session.begin()
        if found is None:
            return None
        self._refuse_together(found.tree)
        self.run_state.apply(found.tree)
        if self.weights.ring is not None and self.repeats is None:  # a moment is kept with the data position
            self.weights.ring.take(found.step)
        message = f"surefoot: resuming from step {found.step:,}: {found.path}"
        log.info(message)
        if self._ranks.place == 0:
            print_if_not_logged(log, message)
        if self._on_resume is not None:
            self._on_resume(int(found.step), found.path)
        return int(found.step)

    def _warn_of_unused_checkpoints(self) -> None:
        """Before the first step: a run that was killed begins again with step 0 if its loop does not continue it."""
        if self.checkpoints is None or self._restored or self._ranks.place != 0:
            return
        newest = 0
        with suppress(OSError):  # saving reports a folder that cannot be read
            newest = max((each.step for each in self.checkpoints.checkpoints() if each.good), default=0)
        if newest > 0:
            log.warning(
                "surefoot: %s has checkpoints up to step %d, but this run begins with step 0. To continue, draw the "
                "batches from `stabilizer.resume(loader)` or call `stabilizer.restore()`; for a new run, use another "
                "folder.",
                self.checkpoints.folder,
                newest,
            )

    def _refuse_together(self, tree: Any) -> None:
        """Raise `CheckpointError` if any rank cannot load its state: a rank that continued would wait for it."""
        faults = self.run_state.faults(tree) if self._ranks.several else []
        if self._ranks.any(bool(faults)):
            refuse(faults or ["see the output of the other ranks for the reason"])

    def _restore_once(self) -> None:
        """Continue from the newest checkpoint, at the first call only."""
        if self._restored:
            return
        self._restored = True
        if self.checkpoints is not None:
            self.restore()
        else:
            self.weights.selector.check_that_all_save()

    def follow(self, loader: Any, epochs: int) -> FollowedBatches:
        """The remaining batches, from where the run stopped."""
        require(
            hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"),
            f"`loader` must give batches: a loader, a list or an iterator; got {shown(loader)}.",
        )
        require(
            is_whole(epochs) and epochs >= 1, f"`epochs` must be a whole number of at least 1; got {shown(epochs)}."
        )
        self._restore_once()
        self.run_state.batch.follow(loader)
        return self.data.follow(loader, epochs)

    def epochs(self, total: int) -> Iterator[int]:
        """The remaining epochs."""
        require(
            is_whole(total) and total >= 0, f"`total` must be a whole number, and not negative; got {shown(total)}."
        )
        self._restore_once()
        return self.data.epochs(total)


def placed_parts(run_state: RunState, parts: SavedParts) -> Any:
    """The state that this process needs from the parts that all processes saved. Raises `CheckpointError`."""
    tree = parts.tree(parts.base)
    if not isinstance(tree, dict):
        return whole_tensors(tree)
    if not parts.same_ranks and _is_inside_window(tree):
        raise CheckpointError(
            f"the checkpoint was saved by {count_of(parts.count, 'rank')} in the middle of an accumulation window, and "
            "each rank has its own gradients. Start the same number of ranks, or load a step that was saved between "
            "two windows."
        )
    if parts.is_new_rank:
        tree["streams"] = streams_for_new_rank(parts) or read_streams()
    return _placed_tree(run_state, tree)


def _placed_tree(run_state: RunState, tree: dict[str, Any]) -> dict[str, Any]:
    """The same for a state in which tensors that were sharded over processes are `SavedShards`."""
    parts, found = run_state.parts, dict(tree)
    with suppress(KeyError, TypeError, ValueError):  # `RunState.faults` reports what is wrong with it
        models = zip(parts.models, tree["models"], strict=True)
        found["models"] = [placed_model(model, saved) for model, saved in models]
        found["optimizer"] = placed_optimizer(parts.optimizer, tree["optimizer"])
        found["also"] = {name: _placed_part(parts.also.get(name), saved) for name, saved in tree["also"].items()}
    return {name: placed_like(value, None) for name, value in found.items()}


def _placed_part(thing: Any, saved: Any) -> Any:
    if is_stabilizer(thing) and isinstance(saved, dict):
        return _placed_tree(run_state_of(thing), saved)
    if isinstance(thing, torch.optim.Optimizer):
        return placed_optimizer(thing, saved)
    return placed_model(thing, saved) if isinstance(thing, torch.nn.Module) else placed_like(saved, None)


def _is_inside_window(tree: dict[str, Any]) -> bool:
    """Whether a state contains gradients of an incomplete window."""
    own = tree.get("stabilizer")
    window = own.get("window") if isinstance(own, dict) else None
    return isinstance(window, dict) and window.get("sums") is not None
