"""Notes of the steps of one run for its incidents, for any kind of loop.

Healthy steps only pay for the notes (`record/incidents/step_capture.py`). An error while noting or writing ends the
notes with one report, not the run. A disk that fails does not even end the notes: later incidents are tried again,
after pauses that double.

`TrainingStabilizer` says what a step consists of. In a loop of the script's own each backward ends a microbatch, see
`MicrobatchFollower`. Which step is kept is decided elsewhere: `guard/incident_capture.py`, `watch/incidents.py`.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from surefoot.record.incidents.step_capture import StepCapture, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor, nn

    from surefoot.record.incidents.step_capture import Weight

    Method = TypeVar("Method", bound=Callable[..., Any])

log = logging.getLogger("surefoot")

LONGEST_PAUSE = 1024
"""The longest pause, in steps, before a failing disk is tried again."""


def warn(message: str, error: Exception | None = None) -> None:
    """Log a warning, with the traceback of an error that is not the disk's."""
    log.warning("%s", message, exc_info=None if isinstance(error, OSError) else error)


class DiskPauses:
    """Leaves a disk that fails alone for a while: for a step at first, twice as long each time."""

    def __init__(self, report: Callable[[str], None] = warn) -> None:
        """`report` is called with the first of several failures in a row."""
        self._report = report
        self.failures = 0
        """How often in a row the disk has failed."""
        self._asked_at, self._try_from = 0, 0

    def may_try(self, step: int) -> bool:
        """Whether an incident of this step may be written."""
        if step < self._try_from:
            return False
        self._asked_at = step
        return True

    def failed(self, error: OSError) -> None:
        """The disk has failed."""
        self.failures += 1
        self._try_from = self._asked_at + min(2 ** (self.failures - 1), LONGEST_PAUSE)
        if self.failures == 1:
            self._report(
                f"surefoot: the incident of step {self._asked_at} cannot be written ({type(error).__name__}: {error}); "
                "training continues, and later incidents will be written if possible."
            )

    def end(self) -> None:
        """Write the next incident without a pause: the run has moved to another step."""
        self._try_from = 0

    def written(self) -> None:
        """An incident was written."""
        self.failures, self._try_from = 0, 0


class StepNotes:
    """The notes of the current step and of steps that have not been judged yet, until an error ends them."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        home: torch.device,
        lag_steps: int = 0,
        *,
        between_steps: bool = True,
        on_failure: Callable[[Exception], None],
        pauses: DiskPauses | None = None,
    ) -> None:
        """Note the steps of `models`, which are not kept alive.

        Args:
            models: what is trained.
            home: where the parameters are.
            lag_steps: how many steps later the verdict on a step is known.
            between_steps: whether a model may carry a hook where no batch tells that a step has begun.
            on_failure: called with the error that has ended the notes.
            pauses: decides when a disk that has failed is tried again.
        """
        self.capture: StepCapture | None = None
        """What was noted; `None` once the notes have ended."""
        self.pauses = pauses or DiskPauses()
        self._on_failure = on_failure
        try:
            fails = weakly(self.give_up)
            self.capture = StepCapture(models, home, lag_steps, between_steps=between_steps, on_failure=fails)
        except Exception as error:
            self.give_up(error)

    def safely(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function unless the notes have ended. Its error ends them, unless it is the disk's."""
        if self.capture is None:
            return None
        try:
            return function(*args, **kwargs)
        except OSError as error:
            self.pauses.failed(error)
        except Exception as error:
            self.give_up(error)
        return None

    def give_up(self, error: Exception) -> None:
        """End the notes because of an error."""
        self.close()
        self._on_failure(error)

    def close(self) -> None:
        """Note nothing more."""
        capture, self.capture = self.capture, None
        if capture is not None:
            capture.close()

    def note_everything(self) -> None:
        """Hold on to what the models are called with, whatever it costs: for a replay, which is one step long."""
        if self.capture is not None:
            self.capture.hold_all = True

    @property
    def is_noting(self) -> bool:
        """Whether steps are noted now."""
        return self.capture is not None and not self.capture.is_paused

    def window(self, step: int) -> Window | None:
        """The notes of a step; `None` if there are none."""
        return None if self.capture is None else self.capture.window(step)

    # ---- while the run goes on ------------------------------------------------------------------------------------

    def drew(self, batch: Any) -> None:
        """A batch was drawn from `resume`."""
        self.safely(StepCapture.drew, self.capture, batch)

    def was_given(self, batch: Any) -> None:
        """`run_microbatches` was called."""
        self.safely(StepCapture.was_given, self.capture, batch)

    def ran_backward(self, loss: Tensor, weight: Weight) -> None:
        """Backward was run on a loss."""
        self.safely(StepCapture.ran_backward, self.capture, loss, weight)

    def close_microbatch(self) -> None:
        """The microbatch is complete."""
        self.safely(StepCapture.close_microbatch, self.capture)

    def begin(self, step: int) -> None:
        """The step is over; the next one is `step`."""
        self.safely(StepCapture.begin, self.capture, step)

    def restart(self, step: int) -> None:
        """The microbatches so far belong to no step; the current one is the first one of `step`."""
        if self.capture is not None:
            self.capture.current = Window(step, self.capture.current.start)

    def moved_to(self, step: int, under_way: bool, paused: bool = False) -> None:
        """A saved run was loaded, which may have stopped inside a step; or, while `paused`, nothing is noted."""
        self.safely(StepCapture.moved_to, self.capture, step, under_way, paused)
        self.pauses.end()


class MicrobatchFollower:
    """Notes what a loop of the script's own trains on: every backward ends a microbatch.

    Where an optimizer evaluates its closure again, the microbatch is the same, and its last loss counts.
    """

    def __init__(self, notes: StepNotes) -> None:
        self._notes = notes

    def ran_backward(self, root: Tensor | None, again: bool) -> None:
        """A backward was run on a loss, or on what is none, in which case `root` is `None`.

        `again`: whether it was not the first one of a closure.
        """
        self._notes.safely(self._add, root, again)

    def _add(self, root: Tensor | None, again: bool) -> None:
        capture = self._notes.capture
        assert capture is not None
        if root is not None and again:
            capture.ran_again(root)
        elif root is not None:
            capture.ran_backward(root, None)
        if not again:
            capture.close_microbatch()


class _HasNotes(Protocol):
    notes: StepNotes


def quietly(method: Method) -> Method:
    """For methods of an object with `notes`: once those have ended they do nothing, and an error in them ends those."""

    @functools.wraps(method)
    def guarded(self: _HasNotes, *args: Any, **kwargs: Any) -> Any:
        return self.notes.safely(method, self, *args, **kwargs)

    return cast("Method", guarded)


def weakly(method: Callable[[Exception], None]) -> Callable[[Exception], None]:
    """A method of an object that is not kept alive."""
    reference = weakref.WeakMethod(method)

    def call(error: Exception) -> None:
        alive = reference()
        if alive is not None:
            alive(error)

    return call
