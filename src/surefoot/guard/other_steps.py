"""Steps that the user's loop takes beside those of a stabilizer, with the line that takes them. Each is reported once.

- `optimizer.step()` on the gradients that `stabilizer.step()` applies, too. A step of another optimizer, a step on
  other gradients (a phase of training before the stabilizer is used) and one without gradients do no harm, and are
  ignored.
- `scheduler.step()` of the scheduler that was passed to the stabilizer, which then advances twice per step.
- `scheduler.step()` of a scheduler that no checkpoint contains: after a restart it begins with step 0 again.

The count of a scheduler, `last_epoch`, is compared between the steps of the stabilizer. Nothing is replaced: the line
is searched in the source of the functions that are running. Only a scheduler that advances between several consecutive
steps counts: one that is stepped after every epoch, loaded or set forward once does not.

Not covered: a scheduler whose `step` is called in a function that is not running during `stabilizer.step()`.
"""

from __future__ import annotations

import ast
import gc
import inspect
import linecache
import sys
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from surefoot.core.user_code import place, users_frame, variables
from surefoot.guard.step_hooks import StepHook
from surefoot.types import Signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

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
        self._optimizer, self._layout, self._history = weakref.ref(optimizer), layout, history
        self._advances = None if scheduler is None else _Advances(scheduler)
        self._saved = [scheduler, *(also_save or {}).values()] if is_saved else None
        self._other: _OtherScheduler | None = None
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
            line = next((f" ({each.line})" for each in _calls_of_step(self._advances.scheduler)), "")
            self._warn(
                step, "lr.schedule-stepped-twice",
                f"the scheduler advances twice per step: `stabilizer.step()` steps the scheduler that it was given, "
                f"and your loop{line} steps it again. Remove that call of `step()`",
            )  # fmt: skip
        if self._saved is not None and step > 0:
            self._look_for_others(step)

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

    def _look_for_others(self, step: int) -> None:
        """Report a scheduler that the loop steps and no checkpoint contains."""
        assert self._saved is not None
        if self._other is None:
            self._other = _OtherScheduler(None, None)
            with suppress(Exception):  # source that cannot be read, an object with an attribute that raises
                self._other = _unsaved_scheduler(self._optimizer(), self._saved) or self._other
        other = self._other
        if other.advances is None or other.call is None or not other.advances.since_last():
            return
        name, kind = other.call.name, type(other.advances.scheduler).__name__
        self._warn(
            step, "resume.scheduler-not-saved",
            f"no checkpoint contains `{name}` ({kind}), which is stepped at {other.call.line}: after a restart it "
            f"begins with step 0 again, with other learning rates. Pass `scheduler={name}` to the stabilizer and "
            f'remove that line, or pass `also_save={{"scheduler": {name}}}`',
        )  # fmt: skip
        self._other = _OtherScheduler(None, None)

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
        self._reference = weakref.ref(scheduler)
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


class _Call(NamedTuple):
    """A call of a method in the source of the user."""

    name: str
    """The object, as it is written there."""
    line: str
    takes_nothing: bool


class _OtherScheduler(NamedTuple):
    advances: _Advances | None
    call: _Call | None


def _unsaved_scheduler(optimizer: Any, saved: Sequence[Any]) -> _OtherScheduler | None:
    """A scheduler of the optimizer that the running functions step, and that nothing saved contains."""
    if not hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"):  # it has no scheduler of torch's
        return None
    found: dict[int, tuple[Any, list[_Call]]] = {}
    for frame, tree in _running_sources():
        for thing, call in _method_calls(frame, tree, "step"):
            if _count_of(thing) is not None and getattr(thing, "optimizer", None) is optimizer:
                found.setdefault(id(thing), (thing, []))[1].append(call)
    for thing, calls in found.values():
        is_plain = calls[0].takes_nothing or isinstance(thing, ReduceLROnPlateau)
        # With two lines, one may set the scheduler forward after a restart.
        if len({call.line for call in calls}) == 1 and is_plain and not _is_restored(calls[0].name, thing, saved):
            return _OtherScheduler(_Advances(thing), calls[0])
    return None


def _calls_of_step(scheduler: Any) -> Iterator[_Call]:
    for frame, tree in _running_sources():
        for thing, call in _method_calls(frame, tree, "step"):
            if thing is scheduler:
                yield call


def _is_restored(name: str, scheduler: Any, saved: Sequence[Any]) -> bool:
    """Whether a restart continues with the state of a scheduler: it is saved here, or the user's code loads it."""
    if _reaches(saved, scheduler):
        return True
    word = name.rpartition(".")[2]
    for _, tree in _running_sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "last_epoch":
                return True
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _restores(node.func, node, word):
                return True
    return False


def _restores(function: ast.Attribute, call: ast.Call, word: str) -> bool:
    if function.attr == "register_for_checkpointing":
        return True
    if function.attr != "load_state_dict":
        return False
    text = ast.unparse(call).lower()
    return word.lower() in text or "sched" in text


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


# ---- the user's source ----------------------------------------------------------------------------------------------


def _running_sources() -> Iterator[tuple[FrameType, ast.Module]]:
    """The running functions of the user, innermost first, each with the source of its file."""
    frame: FrameType | None = sys._getframe(1)
    while (frame := users_frame(frame)) is not None:
        lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
        try:
            tree = ast.parse("".join(lines))
        except (SyntaxError, ValueError):  # a cell of a notebook with a magic, a file that was edited
            tree = ast.Module([], [])
        yield frame, tree
        frame = frame.f_back


def _method_calls(frame: FrameType, tree: ast.Module, method: str) -> Iterator[tuple[Any, _Call]]:
    """The calls of a method in a source, each with the object that a running function knows by that name."""
    scopes = (variables(frame), frame.f_globals)
    filename = frame.f_code.co_filename
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != method:
            continue
        thing = _named(node.func.value, scopes)
        if thing is not None:
            is_plain = not node.args and not node.keywords
            yield thing, _Call(ast.unparse(node.func.value), place(filename, node.lineno), is_plain)


def _named(expression: ast.expr, scopes: Sequence[Mapping[str, Any]]) -> Any:
    """The object that `name` or `name.part` refers to, without calling code of the user; `None` if it is unknown."""
    if isinstance(expression, ast.Name):
        return next((scope[expression.id] for scope in scopes if expression.id in scope), None)
    if isinstance(expression, ast.Attribute):
        whole = _named(expression.value, scopes)
        return getattr(whole, "__dict__", {}).get(expression.attr)
    return None
