"""Records the steps of one run for its incidents, for any kind of loop.

Healthy steps only cost the recording (`record/incidents/step_capture.py`). An error while recording or writing ends the
recording with one report, not the run. After a disk error, the recording continues: later incidents are tried again,
after pauses that double.

`TrainingStabilizer` defines what a step consists of. In a loop of the script, each backward ends a microbatch, see
`MicrobatchFollower`. Which step is kept is decided elsewhere: `guard/incident_capture.py`, `watch/incidents.py`.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from surefoot.core.weak_reference import weak_callback
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
    """Log a warning, with the traceback of an error that is not a disk error."""
    log.warning("%s", message, exc_info=None if isinstance(error, OSError) else error)


class DiskPauses:
    """Pauses after disk errors: for one step at first, twice as long each time."""

    def __init__(self, report: Callable[[str], None] = warn) -> None:
        """`report` is called with the first of several consecutive failures."""
        self._report = report
        self.failures = 0
        """The number of consecutive disk failures."""
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
    """Records the current step and steps that have not been judged yet, until an error ends it."""

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
        """Record the steps of `models`, which are not kept alive.

        Args:
            models: the trained models.
            home: the device of the parameters.
            lag_steps: the number of steps after which the verdict on a step is known.
            between_steps: whether a model may have a hook before a batch shows that a step has begun.
            on_failure: called with the error that has ended the recording.
            pauses: decides when to try again after a disk error.
        """
        self.capture: StepCapture | None = None
        """The recorded steps; `None` once the recording has ended."""
        self.pauses = pauses or DiskPauses()
        self._on_failure = on_failure
        try:
            fails = weak_callback(self.give_up)
            self.capture = StepCapture(models, home, lag_steps, between_steps=between_steps, on_failure=fails)
        except Exception as error:
            self.give_up(error)

    def safely(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function unless the recording has ended. Its error ends the recording, unless it is a disk error."""
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
        """End the recording because of an error."""
        self.close()
        self._on_failure(error)

    def close(self) -> None:
        """Stop recording."""
        capture, self.capture = self.capture, None
        if capture is not None:
            capture.close()

    def note_everything(self) -> None:
        """Keep all inputs of the models, regardless of cost: for a replay, which has one step."""
        if self.capture is not None:
            self.capture.hold_all = True

    @property
    def is_noting(self) -> bool:
        """Whether steps are recorded now."""
        return self.capture is not None and not self.capture.is_paused

    def window(self, step: int) -> Window | None:
        """The record of a step; `None` if there is none."""
        return None if self.capture is None else self.capture.window(step)

    # ---- during the run -------------------------------------------------------------------------------------------

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
        """The step has ended; the next one is `step`."""
        self.safely(StepCapture.begin, self.capture, step)

    def restart(self, step: int) -> None:
        """Drop the microbatches so far, which belong to no step; the current one is the first of `step`."""
        if self.capture is not None:
            self.capture.current = Window(step, self.capture.current.start)

    def moved_to(self, step: int, under_way: bool, paused: bool = False) -> None:
        """A saved run was loaded, which may have stopped inside a step. While `paused`, nothing is recorded."""
        self.safely(StepCapture.moved_to, self.capture, step, under_way, paused)
        self.pauses.end()


class MicrobatchFollower:
    """Records the data of a loop of the script: every backward ends a microbatch.

    If an optimizer evaluates its closure again, the microbatch is the same, and its last loss is kept.
    """

    def __init__(self, notes: StepNotes) -> None:
        self._notes = notes

    def ran_backward(self, root: Tensor | None, again: bool) -> None:
        """A backward was run on a loss; `root` is `None` if it was not a loss.

        `again` is true if it was not the first one of a closure.
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


def while_noting(method: Method) -> Method:
    """For methods of an object with `notes`: they do nothing after the recording has ended, and an error ends it."""

    @functools.wraps(method)
    def guarded(self: _HasNotes, *args: Any, **kwargs: Any) -> Any:
        return self.notes.safely(method, self, *args, **kwargs)

    return cast("Method", guarded)
