"""Incidents of a loop that surefoot does not run: its optimizer is guarded through `attach`.

Such a loop does not declare what a step consists of. Batches are recorded when data loaders return them, and inputs of
the models through hooks, as everywhere (`record/incidents/step_capture.py`). A microbatch ends with each `backward`
(`record/incidents/backward_calls.py`), a step ends with the optimizer's step.

If several optimizers alternate, a step begins with the batch that is drawn after the step of another optimizer. If none
is drawn, the forward pass belongs to both, and a replay of the second step is not exact; the incident records this.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from surefoot.core.without_hooks import WithoutHooks, runs_eagerly
from surefoot.guard.closure_step import ClosureStep
from surefoot.guard.guarded_optimizer import OpenStep, is_own_hook
from surefoot.guard.incident_capture import MicrobatchFollower, while_noting
from surefoot.observe.readable import is_readable
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

    # ---- events of the loop ------------------------------------------------------------------------------------------

    @while_noting
    def before_backward(self) -> None:
        """A backward is about to run."""
        capture = self._of_this_thread()
        if capture is not None and _has_begun(capture) and not capture.current.microbatches:
            has_any = any(parameter.grad is not None for _, parameter in self._run.layout.parameters)
            capture.current.had_gradients = capture.current.had_gradients or has_any

    @while_noting
    def ran_backward(self, root: Tensor) -> None:
        """A backward has run: the microbatch is complete, unless the optimizer evaluates its closure again."""
        capture = self._of_this_thread()
        if capture is None or not _has_begun(capture) or not runs_eagerly():
            return
        with WithoutHooks():
            is_loss = root.numel() == 1 and is_readable(root)
            self._microbatches.ran_backward(root if is_loss else None, again=self._has_evaluated)

    @while_noting
    def other_steps(self, optimizer: Any) -> None:
        """An optimizer, perhaps another one, is about to step: the next batch begins a new step."""
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

    # ---- events of the optimizer -------------------------------------------------------------------------------------

    def followed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the optimizer's closure, so that later evaluations are known to use the same batch."""
        if self.notes.capture is not None:
            self.notes.capture.current.in_closure = True

        def evaluate() -> Any:
            result = closure()
            self._has_evaluated = True
            return result

        return evaluate

    def decided(self, step: OpenStep | ClosureStep, numbers: StepNumbers, buffers: BufferKeeper) -> None:
        """The optimizer's step has ended, and nothing refused was applied. The gradients still exist.

        On the host, everything is known; on a device, the result of a step is not waited for.
        """
        if self.notes.capture is None:
            return
        refused = numbers.record().skipped if isinstance(step, ClosureStep) else step.refused_unchanged
        in_closure = self.notes.capture.current.in_closure
        self._capture.decided(numbers, refused, buffers, evaluated=in_closure, faults=self._faults)

    def begin(self, step: int) -> None:
        """Start `step`."""
        self._has_evaluated = False
        self.notes.begin(step)

    def close(self) -> None:
        """Stop capturing."""
        self._capture.close()
        _CAPTURES.discard(self)
        stop_listening(self)

    def _faults(self) -> list[str]:
        """The reasons why a replay of the current step cannot be exact, as far as the loop shows."""
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
    """Notify the followers of other optimizers that one is about to step."""
    if _CAPTURES:
        for capture in tuple(_CAPTURES):
            capture.other_steps(optimizer)
