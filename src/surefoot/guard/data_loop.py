"""The data of a run: the remaining batches, the position in them, and stop signals.

Before each batch that is drawn from `resume`, the run can save and stop. A signal that arrives while the run waits for
the next batch is handled immediately, as if it had arrived before.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.core.random_state import set_streams
from surefoot.keep.dead_workers import WorkerErrors
from surefoot.keep.stop_signals import StopSignals, StopWaiting
from surefoot.record.incidents.random_streams import QuickStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from surefoot.guard.repeating import Repeats
    from surefoot.guard.run_state import RunState
    from surefoot.guard.saving import CheckpointSaver
    from surefoot.keep.checkpoint.manager import CheckpointManager


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
