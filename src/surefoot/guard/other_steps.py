"""Steps that the user's loop takes beside those of a stabilizer. Each kind is reported once.

- `optimizer.step()` on the gradients that `stabilizer.step()` applies, too. A step of another optimizer, a step on
  other gradients (a phase of training before the stabilizer is used) and one without gradients do no harm, and are
  ignored.
- `scheduler.step()` of the scheduler that was passed to the stabilizer, which then advances twice per step.
- `scheduler.step()` of a scheduler that no checkpoint contains: after a restart it begins with step 0 again, unless the
  script restores it.

The count of a scheduler, `last_epoch`, is compared between the steps of the stabilizer; nothing is replaced. Only a
scheduler that advances between several consecutive steps counts: one that is stepped after every epoch, loaded or set
forward once does not.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from surefoot.core.user_code import place, users_frame
from surefoot.core.weak_reference import weak_reference
from surefoot.guard.step_hooks import StepHook
from surefoot.types import Signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from surefoot.guard.run_history import RunHistory
    from surefoot.observe.parameters import Layout

GAPS = 3
"""The number of consecutive steps between which a scheduler must advance."""
_MOST_OBJECTS = 20_000
"""The number of objects that are searched for a scheduler; more count as if it was among them."""


class _Gradient:
    """One gradient of a step, without keeping it alive."""

    def __init__(self, layout: Layout) -> None:
        found = _first_gradient(layout)
        self._gradient = None if found is None else weakref.ref(found)
        self._version = 0 if found is None else found._version

    @property
    def exists(self) -> bool:
        """Whether any parameter had a gradient."""
        return self._gradient is not None

    def is_unchanged(self, layout: Layout) -> bool:
        """Whether the parameters still have this gradient: no backward and no `zero_grad()` has changed it."""
        now = _first_gradient(layout)
        return (
            now is not None and self._gradient is not None and self._gradient() is now and now._version == self._version
        )


def _first_gradient(layout: Layout) -> Tensor | None:
    return next((parameter.grad for _, parameter in layout.parameters if parameter.grad is not None), None)


class OtherSteps:
    """Follows what the loop does with the optimizer and the schedulers of a stabilizer."""

    def __init__(
        self,
        optimizer: Any,
        scheduler: Any,
        layout: Layout,
        history: RunHistory,
        *,
        is_saved: bool,
        also_save: Mapping[str, Any] | None,
    ) -> None:
        """Start to follow. `is_saved` says whether the run has checkpoints, which contain `also_save`."""
        self._optimizer, self._layout, self._history = weak_reference(optimizer), layout, history
        self._advances = None if scheduler is None else _Advances(scheduler)
        self._saved = [scheduler, *(also_save or {}).values()] if is_saved else None
        self._unsaved: list[_Advances] | None = None
        """The schedulers that no checkpoint contains; `None` before they are looked for."""
        self._is_own = False
        """Whether the stabilizer is calling the optimizer."""
        self._applied: _Gradient | None = None
        """The gradients of the stabilizer's last step, if they still exist after it."""
        self._taken: _Gradient | None = None
        """The gradients of a step that was taken since, and not by the stabilizer."""
        self._taken_at = ""
        """The line of that step."""
        handles: list[RemovableHandle] = []
        if hasattr(optimizer, "register_step_post_hook"):
            for hook, register in (
                (_stepping, optimizer.register_step_pre_hook),
                (_stepped, optimizer.register_step_post_hook),
            ):
                handles.append(register(StepHook(hook, weakref.ref(self))))
        weakref.finalize(self, _remove, handles).atexit = False

    # ---- events of the stabilizer -----------------------------------------------------------------------------------

    def check_gradients(self, step: int) -> None:
        """The stabilizer is about to apply the present gradients: report if another step has done so before."""
        if self._taken is not None and self._taken.is_unchanged(self._layout):
            self._report_optimizer(step, self._taken_at)

    @contextmanager
    def own_step(self) -> Iterator[None]:
        """While the stabilizer calls the optimizer."""
        self._is_own = True
        try:
            yield
        finally:
            self._is_own = False

    def check_schedulers(self, step: int) -> None:
        """The stabilizer's step is done, except for its scheduler: report what the loop has stepped since the last."""
        if self._advances is not None and self._advances.since_last():
            self._warn(
                step, "lr.schedule-stepped-twice",
                "the scheduler advances twice per step: `stabilizer.step()` steps the scheduler that it was given, and "
                "your loop calls its `step()` again. Remove that call",
            )  # fmt: skip
        if self._saved is not None and step > 0:
            self._check_unsaved(step, self._saved)

    def step_ended(self) -> None:
        """The stabilizer's step is done, with its scheduler."""
        self._applied, self._taken, self._taken_at = _Gradient(self._layout), None, ""
        if self._advances is not None:
            self._advances.take()

    def explain_missing_gradient(self) -> str:
        """Why no parameter has a gradient for the stabilizer's step."""
        fact = "no parameter of the optimizer has a gradient"
        if self._taken is None:
            return fact
        return f"{fact}: {self._taken_at} has applied them and deleted them afterwards. Remove that step"

    # ---- events of the optimizer ------------------------------------------------------------------------------------

    def stepping(self) -> None:
        """The optimizer is about to step."""
        if self._is_own or self._applied is None or torch.compiler.is_compiling():
            return
        if self._applied.is_unchanged(self._layout):
            self._report_optimizer(self._history.counts["steps"], _line())

    def stepped(self) -> None:
        """The optimizer has stepped."""
        if self._is_own or torch.compiler.is_compiling():
            return
        taken = _Gradient(self._layout)
        if taken.exists:
            self._taken, self._taken_at = taken, _line()

    # ---- reports ----------------------------------------------------------------------------------------------------

    def _report_optimizer(self, step: int, line: str) -> None:
        where = f" at {line}" if line else ""
        self._warn(
            step, "optim.stepped-twice",
            f"the same gradients are applied twice: by `stabilizer.step()` and by `step()` of the optimizer{where}, "
            "which is not guarded. Remove the latter",
        )  # fmt: skip

    def _check_unsaved(self, step: int, saved: Sequence[Any]) -> None:
        """Report a scheduler that the loop steps and no checkpoint contains."""
        if self._unsaved is None:
            self._unsaved = [_Advances(each) for each in _schedulers_of(self._optimizer()) if not _reaches(saved, each)]
        for each in [each for each in self._unsaved if each.since_last()]:
            self._unsaved.remove(each)
            self._warn(
                step, "resume.scheduler-not-saved",
                f"no checkpoint contains the {type(each.scheduler).__name__} that your loop steps: after a restart it "
                "begins with step 0 again, with other learning rates, unless your script restores it. Pass it to the "
                "stabilizer as `scheduler=` and remove its `step()`, or pass it in `also_save`",
            )  # fmt: skip

    def _warn(self, step: int, kind: str, summary: str) -> None:
        self._history.warn_once(Signals(step), kind, summary)


def _stepping(reference: weakref.ref[OtherSteps], *_: Any) -> None:
    if (steps := reference()) is not None:
        steps.stepping()


def _stepped(reference: weakref.ref[OtherSteps], *_: Any) -> None:
    if (steps := reference()) is not None:
        steps.stepped()


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _line() -> str:
    frame = users_frame(sys._getframe(1))
    return "" if frame is None else place(frame.f_code.co_filename, frame.f_lineno)


# ---- schedulers -----------------------------------------------------------------------------------------------------


class _Advances:
    """Whether a scheduler advances between steps of the stabilizer."""

    def __init__(self, scheduler: Any) -> None:
        self._reference = weak_reference(scheduler)
        self._last: int | None = None
        self._gaps = 0

    @property
    def scheduler(self) -> Any:
        """The scheduler; `None` if it no longer exists."""
        return self._reference()

    def take(self) -> None:
        """The stabilizer's step is over: what the scheduler counts from here on is not the stabilizer's."""
        self._last = _count_of(self.scheduler)

    def since_last(self) -> bool:
        """Whether it has advanced since the stabilizer's last step, and between those before."""
        now, last = _count_of(self.scheduler), self._last
        self._last = now
        self._gaps = self._gaps + 1 if now is not None and last is not None and now > last else 0
        return self._gaps >= GAPS


def _count_of(scheduler: Any) -> int | None:
    count = getattr(scheduler, "__dict__", {}).get("last_epoch")
    return count if type(count) is int else None


def _schedulers_of(optimizer: Any) -> list[Any]:
    """The schedulers of an optimizer that do not belong to another one. Searches all objects."""
    if not hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"):  # it has no scheduler of torch's
        return []
    found = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), LRScheduler) and vars(each).get("optimizer") is optimizer
    ]
    parts = {id(part) for each in found for part in getattr(each, "_schedulers", ())}
    return [each for each in found if id(each) not in parts]


def _reaches(roots: Sequence[Any], thing: Any) -> bool:
    """Whether an object can be reached from others, or they refer to too many objects to search all."""
    known, waiting = set(), deque(roots)
    while waiting:
        each = waiting.popleft()
        if each is thing:
            return True
        if id(each) in known or isinstance(each, (torch.Tensor, type, str)) or inspect.ismodule(each):
            continue
        known.add(id(each))
        if len(known) > _MOST_OBJECTS:
            return True
        waiting.extend(gc.get_referents(each))
    return False
