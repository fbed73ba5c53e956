"""Incidents of a loop that surefoot does not run: one whose optimizer has a guard by `attach`.

Nobody says there what a step consists of. Batches are seen as data loaders hand them out, and what the models are
called with through hooks, as everywhere (`record/incidents/step_capture.py`). A microbatch ends with each `backward`
(`record/incidents/backward_calls.py`), a step with the optimizer's.

Where several optimizers take turns, a step begins with the batch that is drawn after the step of another optimizer. If
none is drawn, the forward belongs to both, and a replay of the second step is not exact; the incident says so.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from surefoot.guard.closure_step import ClosureStep
from surefoot.guard.guarded_optimizer import OpenStep, is_own_hook
from surefoot.guard.step_notes import MicrobatchFollower, quietly
from surefoot.observe.readable import is_readable
from surefoot.observe.without_hooks import WithoutHooks, runs_eagerly
from surefoot.record.incidents.backward_calls import listen, stop_listening

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from surefoot.guard.incident_capture import IncidentCapture, RunToCapture
    from surefoot.guard.step_decision import StepNumbers
    from surefoot.keep.buffers import BufferKeeper
    from surefoot.record.incidents.step_capture import StepCapture

_CAPTURES: weakref.WeakSet[LoopCapture] = weakref.WeakSet()
HAD_GRADIENTS = "gradients existed before the first backward pass of the step, and a replay starts without them"
HAS_HOOKS = "the optimizer has other step hooks, which may have changed the gradients"
TRAINS_OTHERS = "another optimizer trains models that were not passed to `attach`, and those are not kept"


class LoopCapture:
    """Follows the steps of one optimizer for an `IncidentCapture`."""

    def __init__(self, capture: IncidentCapture, run: RunToCapture) -> None:
        """Follow the steps of the run's optimizer."""
        self._capture, self._run, self.notes = capture, run, capture.notes
        self._microbatches = MicrobatchFollower(capture.notes)
        self._thread = threading.get_ident()
        self._has_evaluated = False
        """Whether the closure of the current step has been evaluated."""
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        self._trains_others = False
        listen(self)
        _CAPTURES.add(self)

    # ---- what the loop does -----------------------------------------------------------------------------------------

    @quietly
    def before_backward(self) -> None:
        """A backward is about to run."""
        capture = self._of_this_thread()
        if capture is not None and _has_begun(capture) and not capture.current.microbatches:
            has_any = any(parameter.grad is not None for _, parameter in self._run.layout.parameters)
            capture.current.had_gradients = capture.current.had_gradients or has_any

    @quietly
    def ran_backward(self, root: Tensor) -> None:
        """A backward was run: the microbatch is complete, unless the optimizer evaluates its closure once more."""
        capture = self._of_this_thread()
        if capture is None or not _has_begun(capture) or not runs_eagerly():
            return
        with WithoutHooks():
            is_loss = root.numel() == 1 and is_readable(root)
            self._microbatches.ran_backward(root if is_loss else None, again=self._has_evaluated)

    @quietly
    def other_steps(self, optimizer: Any) -> None:
        """An optimizer is about to step, perhaps another one: the batch that is drawn next begins a new step."""
        capture = self._of_this_thread()
        if capture is None or optimizer is self._run.optimizer:
            return
        capture.current.interrupted = capture.current.interrupted or _has_begun(capture)
        if optimizer not in self._others:
            self._others.add(optimizer)
            known = {id(parameter) for model in self._run.models for parameter in model.parameters()}
            given = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._trains_others = self._trains_others or any(id(parameter) not in known for parameter in given)

    def _of_this_thread(self) -> StepCapture | None:
        return self.notes.capture if threading.get_ident() == self._thread else None

    # ---- what the optimizer does ------------------------------------------------------------------------------------

    def followed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure that the optimizer was given; later evaluations are known to be of the same batch."""
        if self.notes.capture is not None:
            self.notes.capture.current.in_closure = True

        def evaluate() -> Any:
            result = closure()
            self._has_evaluated = True
            return result

        return evaluate

    def decided(self, step: OpenStep | ClosureStep, numbers: StepNumbers, buffers: BufferKeeper) -> None:
        """The optimizer's step is over, and nothing that was refused has been applied. The gradients are still there.

        On the host all of it is known; on a device a step that is not known to be refused by now is not waited for.
        """
        if self.notes.capture is None:
            return
        refused = numbers.record().skipped if isinstance(step, ClosureStep) else step.refused_unchanged
        in_closure = self.notes.capture.current.in_closure
        self._capture.decided(numbers, refused, buffers, evaluated=in_closure, faults=self._faults)

    def begin(self, step: int) -> None:
        """The next step is `step`."""
        self._has_evaluated = False
        self.notes.begin(step)

    def close(self) -> None:
        """Capture nothing more."""
        self._capture.close()
        _CAPTURES.discard(self)
        stop_listening(self)

    def _faults(self) -> list[str]:
        """Why a replay of the current step cannot be exact, as far as the loop shows."""
        assert self.notes.capture is not None
        had_gradients = self.notes.capture.current.had_gradients
        hooks = self._run.optimizer._optimizer_step_pre_hooks.values()
        has_hooks = any(not is_own_hook(hook) for hook in hooks)
        known = {HAD_GRADIENTS: had_gradients, HAS_HOOKS: has_hooks, TRAINS_OTHERS: self._trains_others}
        return [fault for fault, holds in known.items() if holds]


def _has_begun(capture: StepCapture) -> bool:
    """Whether anything was recorded about the current step."""
    return bool(capture.current.microbatches or capture.under_way.drawn or capture.under_way.callers)


def optimizer_steps(optimizer: Any) -> None:
    """Tell those who follow other optimizers that one is about to step."""
    if _CAPTURES:
        for capture in tuple(_CAPTURES):
            capture.other_steps(optimizer)
