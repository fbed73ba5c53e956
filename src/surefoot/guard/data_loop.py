"""The data of a run: batches that are left, the place in them, and signals to stop.

Before each batch that is drawn from `resume` is a moment to save and to stop. A signal that comes while the next batch
is waited for is acted upon at once, as if it had come before.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from surefoot.core.random_state import set_streams
from surefoot.keep.dead_workers import WorkerErrors
from surefoot.keep.stop_signals import StopSignals, StopWaiting
from surefoot.record.incidents.random_streams import QuickStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from surefoot.guard.run_state import RunState
    from surefoot.guard.saving import CheckpointSaver
    from surefoot.keep.checkpoint.manager import CheckpointManager


class BetweenBatches(Protocol):
    """What is done between two batches so that steps can be repeated."""

    def go_back(self) -> None:
        """Return to an earlier moment, if that was decided since the last batch."""

    def take_moment(self) -> None:
        """Keep this moment, if it is time to."""

    def leaves_out_next(self) -> bool:
        """Whether the batches of the next step are to be left out."""

    def leave_out(self) -> None:
        """Count the next step as one that was left out: its batches are drawn."""


class DrawnWindows:
    """Which iterators drew a batch for each step: what one step of the loop consists of."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps taken on the batches of the current window."""
        self._last_steps = 0
        self._drawn: list[weakref.ref[DrawnBatches]] = []
        self._last: list[weakref.ref[DrawnBatches]] = []

    def drew(self, drawn: DrawnBatches) -> None:
        """One of the iterators is about to draw a batch."""
        self._drawn.append(weakref.ref(drawn))

    def close(self) -> None:
        """The next batch belongs to another step."""
        # At the end of the data a window may be short.
        if len(self._drawn) >= len(self._last) or any(each() is None for each in self._last):
            self._last = self._drawn
        self._last_steps = self.steps if self._drawn else 0
        self._drawn, self.steps = [], 0

    def drawn_by(self) -> list[DrawnBatches]:
        """The iterators that drew the batches of a whole window, in order; none before the first one."""
        return [drawn for reference in self._last if (drawn := reference()) is not None]

    @property
    def have_one_step_each(self) -> bool:
        """Whether each step has batches of its own, so that a step can be left out with them. Asked inside a step."""
        return self.steps == 0 and self._last_steps in (0, 1)


class DataLoop:
    """Follows the loaders of a run."""

    def __init__(
        self,
        run_state: RunState,
        saver: CheckpointSaver,
        checkpoints: CheckpointManager | None,
        *,
        several_ranks: bool,
        on_draw: Callable[[Any], None] | None,
        on_stop_point: Callable[[], None],
        on_failed_draw: Callable[[Exception], None],
        on_begin: Callable[[], Callable[[int], None]],
        repeats: BetweenBatches | None = None,
        microbatches: Callable[[], int] = lambda: 1,
    ) -> None:
        """Follow loaders from here on.

        Args:
            run_state: knows the place in the data.
            saver: saves what is due between two batches.
            checkpoints: names the signals that stop a run.
            several_ranks: whether other processes train with this one, and stop only together.
            on_draw: called with each batch that was drawn.
            on_stop_point: called where the run can stop; saves and exits if it was asked to.
            on_failed_draw: called with the error of a loader, between two batches: the run is whole.
            on_begin: called before the first batch of a loop; what it returns is called with the number of batches
                when the data are at their end.
            repeats: returns to an earlier moment between two batches, and says which steps are left out.
            microbatches: returns how many batches a step takes, where none was taken yet.
        """
        self._repeats, self._microbatches = repeats, microbatches
        self.windows = DrawnWindows()
        self._run_state, self._saver, self._several_ranks = run_state, saver, several_ranks
        self._quick_streams = QuickStreams() if checkpoints is not None else None
        self.interrupts = StopSignals(checkpoints.signals if checkpoints else ())
        self._drawer: int | None = None  # the thread that batches are drawn in
        self._stepper: int | None = None  # the one that trains
        self._drawn = False
        self.on_draw, self._on_stop_point, self.on_begin = on_draw, on_stop_point, on_begin
        self._on_failed_draw, self._worker_errors = on_failed_draw, WorkerErrors()

    def follow(self, loader: Any, epochs: int) -> FollowedBatches:
        """The batches that are left, from where the run stopped."""
        put_back = self._run_state.put_streams_back
        return FollowedBatches(self._run_state.position.follow(loader, epochs=epochs, after_positioning=put_back), self)

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs that are left."""
        numbers = self._run_state.position.epochs(total, after_positioning=self._run_state.put_streams_back)
        return self._epochs_until_stopped(numbers)

    def _epochs_until_stopped(self, numbers: Iterator[int]) -> Iterator[int]:
        with self.interrupts.installed():
            for number in numbers:
                self._on_stop_point()  # a signal that came after the last step of the epoch before
                yield number
            self._on_stop_point()

    @property
    def between_batches_soon(self) -> bool:
        """Whether this was the first step since a batch was drawn from `resume`, so that the next may be drawn now."""
        return self._drawn and self._drawer == threading.get_ident()

    def step_over(self) -> None:
        """All that a step calls for is done."""
        self._drawn, self._stepper = False, threading.get_ident()
        self.windows.steps += 1

    def before_draw(self, drawn: DrawnBatches) -> bool:
        """The next batch is requested; returns whether this is a moment between two."""
        between = not self._drawn  # with two loaders side by side, before the first of the two
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
        """Before a batch is drawn between two: draw the batches of steps that are left out, and train on none of them.

        Raises `StopIteration` where that takes the data to their end.
        """
        repeats = self._repeats
        while repeats is not None and self._stepper in (None, threading.get_ident()) and repeats.leaves_out_next():
            left = 0
            try:
                for owner in self.windows.drawn_by() or [drawn] * self._microbatches():
                    self.draw(owner.batches, between=False)
                    left += 1
            finally:
                if left:
                    repeats.leave_out()
            self.before_draw(drawn)

    def why_not_repeated(self) -> str | None:
        """Why steps cannot be repeated as the loop draws its batches; `None` if they can."""
        if self._drawer is None:
            return "batches are not drawn from `stabilizer.resume(loader)`"
        if self._drawer != threading.get_ident():
            return "batches are drawn in a different thread from the one that trains"
        return None

    def draw(self, batches: Iterator[Any], between: bool) -> Any:
        """The next batch. A stop signal that comes while it is waited for is acted upon as if it had come before."""
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
                    self._on_failed_draw(error)
            finally:  # what the program does after an error of its loader is as it would be without a save
                self._run_state.position.back_to(failed_at)
                set_streams(drawn.full())
            raise

    @property
    def _may_stop_waiting(self) -> bool:
        """Whether a signal may end the waiting for a batch: not that of one rank alone, which the others wait for."""
        if self._quick_streams is None or self._several_ranks or self._stepper not in (None, threading.get_ident()):
            return False
        return threading.current_thread() is threading.main_thread() and self._run_state.position.can_mark

    @property
    def is_passing_over(self) -> bool:
        """Whether the place where the run stopped is still to come: this pass was complete by then."""
        return self._run_state.position.pending

    def stop_here(self) -> None:
        """Save what is due, and stop if asked to, unless this is a thread that draws ahead of the one that trains."""
        if self._stepper in (None, threading.get_ident()):
            self._saver.copy_due()
            self._on_stop_point()

    def after_draws(self) -> None:
        """No more batches are requested. There may be no further step: what is due is written now."""
        if self._drawer != threading.get_ident():
            return
        died = self._saver.finish()
        self._worker_errors.close()
        self._drawer = None
        if died is not None:
            raise died


class FollowedBatches:
    """Batches of a loader; stop signals are received while they are drawn, and no batch is drawn after one."""

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
        self._drawn, self._on_end = 0, loop.on_begin()

    def __iter__(self) -> DrawnBatches:
        return self

    def __next__(self) -> Any:
        between = self._loop.before_draw(self)
        try:
            if between:
                self._loop.leave_out_steps(self)
            batch = self._loop.draw(self.batches, between)
        except StopIteration:
            if not self._loop.is_passing_over:
                self._on_end(self._drawn)
            self._loop.stop_here()  # at the end of the data there may be no step to come
            raise
        except Exception:
            self._loop.stop_here()  # the signal may have ended what loads the data
            raise
        self._drawn += 1
        if self._loop.on_draw is not None:
            self._loop.on_draw(batch)
        return batch
