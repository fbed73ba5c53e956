"""The two hooks that torch runs around every step of an attached optimizer, and their order among other hooks.

The first hook measures the gradients and decides (`GuardedOptimizer.begin`). The second (`GuardedOptimizer.end`)
restores what the first one changed for the step:

- A fused optimizer gets `grad_scale` and `found_inf`, combined with those of a `GradScaler`. The host does not wait.
- For any other optimizer the gradients are clipped in place. If the step is refused, they are removed during the call,
  so that the optimizer does nothing. If its `step` is not torch's, it gets zeros, and its effects (weight decay, step
  counts) are undone: its parameters, `state` and `param_groups` are copied before the call and restored after it.
- A closure is replaced by one that calls it and decides afterwards. If `step` is neither torch's nor L-BFGS's, the copy
  is made before every step.

The hooks run last before the step and first after it, regardless of other hooks and their order.

If a step raises, torch does not run the second hook. The first one returns its own keyword arguments to torch, which
are deleted when the call ends: at that point the changes are undone, and a copy is dropped. Weights stay as the
optimizer left them.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from surefoot.act.apply import HOOKED_STEP, has_torchs_step
from surefoot.core.device import has_streams, is_capturing
from surefoot.core.weak_reference import IdentityMap, InertWhenCopied
from surefoot.core.without_hooks import WithoutHooks, runs_eagerly
from surefoot.errors import TrainingHalted, UsageError
from surefoot.guard.closure_step import ClosureStep
from surefoot.guard.guarded_optimizer import GuardedOptimizer, OpenStep, StepFacts
from surefoot.guard.loop_capture import LoopCapture, optimizer_steps
from surefoot.guard.step_decision import StepNumbers
from surefoot.guard.validation import signal_value
from surefoot.types import Scalar, Signals, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from surefoot.guard.attached_recovery import AttachedRecovery
    from surefoot.guard.context import GuardContext
    from surefoot.guard.step_decision import StepDecision
    from surefoot.guard.step_results import StepResults
    from surefoot.observe.parameters import BackwardOrder

log = logging.getLogger("surefoot")


def run_directly(hook: Callable[..., Any], *args: Any) -> Any:
    """Call a hook. This is the default `run_hook`."""
    return hook(*args)


class StepAccount:
    """What is known about the next step besides its gradients, and the receiver of a step's numbers."""

    def __init__(
        self,
        guarded: GuardedOptimizer,
        results: StepResults,
        order: BackwardOrder,
        capture: LoopCapture | None,
        recovery: AttachedRecovery | None,
    ) -> None:
        self._guarded, self.results, self._order, self._capture = guarded, results, order, capture
        self._recovery = recovery
        self._loss: Scalar | None = None
        self._evaluated: Scalar | None = None
        self._own: dict[str, Scalar] = {}
        self._clipped: Tensor | None = None
        self._was_broken: Tensor | None = None

    def observe(self, loss: Any, signals: dict[str, Scalar]) -> None:
        """Keep a loss, unless it is `None` or not a number, and the user's own signals for the next step."""
        found = _as_scalar(loss)
        self._loss = self._loss if found is None else found
        for name, value in signals.items():
            self._own[name] = signal_value(name, value)

    def clipped(self, factor: Tensor | float) -> None:
        """The gradients of the next step have just been multiplied by `factor`, which replaces an earlier one.

        Does not read from a device. A tensor that cannot be divided by counts as unknown.
        """
        if isinstance(factor, Tensor) and factor.numel() != 1:
            raise UsageError(f"`clip_factor` must be one number; got a tensor of shape {tuple(factor.shape)}.")
        home = self._guarded.layout.home
        is_number = isinstance(factor, (int, float)) and math.isfinite(factor) and factor > 0
        if not isinstance(factor, Tensor) and not is_number:
            raise UsageError(f"`clip_factor` must be a finite number above 0, or a tensor with one; got {factor!r}.")
        if isinstance(factor, Tensor) and (has_streams(factor.device) or not has_streams(home)):
            self._clipped = factor.detach().reshape(()).to(home)
        else:  # from the host, by a launch: a copy would wait
            self._clipped = torch.full((), float(factor), dtype=torch.float32, device=home)

    def was_broken(self, flag: Tensor) -> None:
        """Whether the gradients of the next step were not finite before they were clipped by value."""
        flag = flag.to(self._guarded.layout.home)
        self._was_broken = flag if self._was_broken is None else self._was_broken | flag

    def forget(self) -> None:
        """The gradients of the next step were deleted: drop what was known about them.

        The user's own signals are kept: they may be passed at any time.
        """
        self._loss = self._evaluated = self._clipped = self._was_broken = None

    def evaluated(self, loss: Any) -> None:
        """A closure has returned a loss, which is used unless one was passed for the step."""
        found = _as_scalar(loss)
        self._evaluated = self._evaluated if found is None else found

    def facts(self, loss: Any = None) -> StepFacts:
        """What is known about the next step, with the loss that its closure has returned."""
        self.evaluated(loss)
        loss_now = self._evaluated if self._loss is None else self._loss
        if isinstance(loss_now, float):
            loss_now = torch.full((), loss_now, device=self._guarded.layout.home)
        lr_factor = self.results.lr_factor
        limit = self.results.history.budgets.rates.limit
        return StepFacts(
            self.results.steps, loss_now, 1.0, self._own, lr_factor, self._clipped, self._was_broken, limit
        )

    def before_update(self) -> None:
        """The optimizer is about to write."""
        if self._recovery is not None:
            self._recovery.before_update(self.results.steps, self._guarded.rates())

    def without_gradient(self, *, is_intended: bool) -> StepNumbers:
        """The numbers of a step for which no parameter had a gradient, with one warning unless that is intended."""
        signals = Signals(self.results.steps, lr=self._guarded.lr(self.results.lr_factor))
        if not is_intended:
            summary = "no parameter of the optimizer has a gradient"
            self.results.history.warn_once(signals, "optim.no-gradient", summary)
        return StepNumbers(StepRecord(signals, skipped=False))

    def skipped_by_scaler(self, loss_scale: float) -> None:
        """A step was skipped without a call of the optimizer."""
        lr = self._guarded.lr(self.results.lr_factor)
        loss = None if self._loss is None else float(self._loss)
        signals = Signals(self.results.steps, loss, lr=lr, loss_scale=float(loss_scale))
        alone = self._guarded.decider.group is None  # other ranks may have other losses, and must respond equally
        if alone and loss is not None and not math.isfinite(loss):  # a smaller scale would not cure this
            record = StepRecord(signals, skipped=True, reasons=("nonfinite",))
        else:
            record = StepRecord(signals, skipped=True, overflow=True)
        self.take(StepNumbers(record))

    def take(self, numbers: StepNumbers) -> None:
        """A step has ended. Raises `TrainingHalted` when the budgets are used up."""
        self.close()
        self.forget()
        self._own = {}
        with WithoutHooks():
            if self._capture is not None:
                self._capture.begin(self.results.steps + 1)
            self.results.take(numbers)
            if self._recovery is not None:
                self._recovery.after_step(self.results.steps)

    def close(self) -> None:
        """Stop recording the order in which gradients are computed."""
        self._order.stop()

    def forget_states(self) -> None:
        """No step will follow: release the earlier states."""
        if self._recovery is not None:
            self._recovery.weights.forget_snapshots()


def _as_scalar(loss: Any) -> Scalar | None:
    """A loss as one number; `None` if it is not one."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach().reshape(())
    return float(loss) if isinstance(loss, (int, float)) else None


class _Keywords(dict[str, Any]):
    """The keyword arguments of one call of `step`, which exist exactly as long as the call."""

    __slots__ = ("__weakref__",)


class StepHook(InertWhenCopied, partial[Any]):
    """A hook of a guard on its optimizer. In a copied or unpickled optimizer, it does nothing.

    This matters for optimizers whose `__getstate__` returns their whole `__dict__`.
    """


class StepHooks:
    """The two hooks of one attachment, with their data. Belongs to the optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        guard: GuardContext,
        account: StepAccount,
        capture: LoopCapture | None,
        on_decision: Callable[[StepDecision, bool], None] | None,
        run_hook: Callable[..., Any],
        *,
        acts: bool,
    ) -> None:
        self.guard, self._guarded, self.account, self.acts = guard, guard.guarded, account, acts
        self._capture, self._on_decision, self._run_hook = capture, on_decision, run_hook
        self.active = True
        self._call: weakref.ref[_Keywords] | None = None
        """The current call of `step`."""
        self._open: OpenStep | ClosureStep | None = None
        """The decided step for this call."""
        self.left_out: Any = False
        """Whether the last step was skipped; on the device, a tensor."""
        self._without_loss = False
        """Whether the closure of the current step has returned no loss: Lightning's `training_step` may return None."""
        self._warned = False
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(StepHook(run_hook, self.before)),
            optimizer.register_step_post_hook(StepHook(run_hook, self.after)),
        ]
        self.key_before, self.key_after = (handle.id for handle in self._handles)
        _HOOKS.set(optimizer, [*hooks_of(optimizer), self])
        _put_in_order(optimizer, (), {})
        HOOK_ORDER.begin()

    def remove(self, besides: int = 0) -> None:
        """Remove the hooks, immediately or, inside more than `besides` calls of `step`, before the next step."""
        self.active = False
        self.account.close()
        self.account.forget_states()
        if self._capture is not None:
            self._capture.close()
        optimizer = self._guarded.optimizer
        if optimizer is not None and _is_stepping(optimizer, besides):
            return
        self._abandon()
        for handle in self._handles:
            handle.remove()
        if optimizer is not None:
            _HOOKS.set(optimizer, [hooks for hooks in hooks_of(optimizer) if hooks is not self])

    @property
    def is_under_way(self) -> bool:
        """Whether a step was prepared that has not been processed yet: otherwise `after` does nothing."""
        return self._call is not None

    # ---- around a step ----------------------------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the step: decide, or replace the closure by one that decides after it."""
        if torch.compiler.is_compiling() or not self.active or optimizer is not self._guarded.optimizer:
            return None
        if self._call is not None:
            if _is_stepping(optimizer, besides=1):
                return None  # a subclass calls the `step` of its base class
            self._abandon()  # the previous step has raised
        if not self._can_run():
            return None
        given = kwargs if isinstance(kwargs, _Keywords) else _Keywords(kwargs)
        self.left_out = self._without_loss = False
        self._call = weakref.ref(given, self._call_ended)
        try:
            return self._before(args, given)
        except Exception as error:
            self._abandon()
            if self.acts:
                raise
            self._give_up(error)
        return None

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """After the step: restore what was changed for it, and process the result."""
        if self._call is None:
            return
        call = self._call()
        if call is not kwargs and (call is not None or _is_stepping(optimizer, besides=1)):
            return  # not the call that `before` has prepared
        step, self._open, self._call = self._open, None, None
        try:
            if step is None:
                return
            with WithoutHooks():
                numbers = self._ended(step)
                if self.active and self._capture is not None and numbers is not None:
                    self._capture.decided(step, numbers, self.account.results.buffers)
            if self.active:
                self.account.take(numbers or self.account.without_gradient(is_intended=self._without_loss))
        except TrainingHalted:
            raise
        except Exception as error:
            if self.acts:
                raise
            self._give_up(error)

    def _ended(self, step: OpenStep | ClosureStep) -> StepNumbers | None:
        """Restore what was changed for a step. An observer gets the decision of a guard on the same optimizer."""
        if isinstance(step, ClosureStep):
            numbers = step.end()
            self.left_out = numbers is not None and numbers.record().skipped
            return numbers
        if not self.acts:
            for hooks in hooks_of(self._guarded.optimizer):
                if hooks.acts:
                    step.left_out = hooks.left_out
        return self._guarded.end(step)

    def _call_ended(self, call: weakref.ref[_Keywords]) -> None:
        """A call of `step` has ended without `after`: it has raised."""
        optimizer = self._guarded.optimizer
        if call is self._call and (optimizer is None or not _is_stepping(optimizer)):
            self._abandon()

    def _before(self, args: tuple[Any, ...], kwargs: _Keywords) -> Any:
        with WithoutHooks():
            self._guarded.look_for_new_parameters()
            if self.guard.setup is not None:
                self.guard.setup.check(self.account.results.steps)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._begin()
            return args, kwargs
        if self._capture is not None:
            closure = self._capture.followed(closure)
        replaced = self._decided(closure)
        if len(args) > 1:
            return (args[0], replaced, *args[2:]), kwargs
        kwargs["closure"] = replaced
        return args, kwargs

    def _begin(self) -> None:
        """Decide on the current gradients; a refused step is made to do nothing."""
        with WithoutHooks():
            self.account.before_update()
            self._open = step = self._guarded.begin(self.account.facts())
            if step.decision is not None:
                self.left_out = step.decision.skip
                if self._on_decision is not None:
                    self._on_decision(step.decision, step.refused)
            if step.refused:
                self._guarded.withhold(step)

    def _abandon(self) -> None:
        """Restore what was changed for a step that has raised. Weights stay: they may have been loaded since."""
        step, self._open, self._call = self._open, None, None
        if step is not None:
            step.undo.close()

    def _give_up(self, error: Exception) -> None:
        """Stop observing after an error, with one warning or as `run_hook` handles it. Observation never ends a run."""
        self._abandon()
        self.active = False
        if self._run_hook is not run_directly:
            raise error
        log.warning(
            "surefoot: %s is no longer observed (%s: %s); training continues.",
            type(self._guarded.optimizer).__name__,
            type(error).__name__,
            " ".join(str(error).split())[:300],
            exc_info=error,
        )

    def _can_run(self) -> bool:
        if runs_eagerly() and not is_capturing(self._guarded.layout.home):
            return True
        if not self._warned and self.acts:
            self._warned = True
            log.warning(
                "surefoot: steps of %s that run inside a dispatch mode, a trace or a graph capture are not guarded.",
                type(self._guarded.optimizer).__name__,
            )
        return False

    # ---- closures ---------------------------------------------------------------------------------------------------

    def _decided(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure, with the decision after its first evaluation."""
        if self.acts and not _evaluates_first(self._guarded.optimizer):
            with WithoutHooks():
                self.account.before_update()
                self._open = step = ClosureStep(self._guarded, closure, self.account.facts, raises=False)
            return self._undoing(step)
        evaluated = False

        @functools.wraps(closure)
        def decided(*args: Any, **kwargs: Any) -> Any:
            nonlocal evaluated
            loss = closure(*args, **kwargs)
            if not evaluated:
                evaluated = True
                self._run_hook(self._after_evaluation, loss)
            return loss

        return decided

    def _after_evaluation(self, loss: Any) -> None:
        self._without_loss = loss is None
        try:
            self.account.evaluated(loss)
            self._begin()
        except Exception as error:
            self._abandon()
            if self.acts:
                raise
            self._give_up(error)

    def _undoing(self, step: ClosureStep) -> Callable[..., Any]:
        """The closure of a step; if it raises, the step ends as in the bare optimizer."""

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            except BaseException:
                self._open = self._call = None
                step.raised()
                raise

        return evaluate


def _evaluates_first(optimizer: Any) -> bool:
    """Whether `step` is one of torch's that calls its closure once, before any change."""
    return has_torchs_step(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


# ---- the order among other hooks -----------------------------------------------------------------------------------

_HOOKS: IdentityMap[list[StepHooks]] = IdentityMap()


def hooks_of(optimizer: Any) -> list[StepHooks]:
    """The hooks of all attachments of an optimizer."""
    return _HOOKS.get(optimizer) or []


class _HookOrder:
    """The hook that torch runs before the step of every optimizer, while there is an attachment."""

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        self.stays = False
        """Whether it stays without an attachment."""

    def begin(self) -> None:
        """Start to keep the order of hooks."""
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(_put_in_order)

    def end_if_unused(self) -> None:
        """Remove the hook with the last attachment, but not while torch iterates over the hooks of a step."""
        if self._handle is not None and not self.stays and not any(_HOOKS.values()) and not _is_in_step():
            self._handle.remove()
            self._handle = None


HOOK_ORDER = _HookOrder()


def keep_hook_order() -> None:
    """Keep the order of hooks until `release_hook_order`: needed before an attachment is made inside a step."""
    HOOK_ORDER.stays = True
    HOOK_ORDER.begin()


def release_hook_order() -> None:
    """Keep the order of hooks only while there is an attachment, which is the default."""
    HOOK_ORDER.stays = False
    HOOK_ORDER.end_if_unused()


def _put_in_order(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before any hook of the optimizer runs, move surefoot's to the last position before the step and the first after
    it.

    Changes of other hooks to the gradients are then included in the decision, and what was changed for the step is
    restored before they run. Observers come before guards, so that they see the unchanged gradients.
    """
    if torch.compiler.is_compiling():
        return
    optimizer_steps(optimizer)
    attached = hooks_of(optimizer)
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    if len(attached) == 1 and attached[0].active:  # the usual case, at each step
        only = attached[0]
        if next(reversed(before), None) == only.key_before and next(iter(after), None) == only.key_after:
            return
    for hooks in attached:
        if not hooks.active:
            hooks.remove(besides=1)
    attached = hooks_of(optimizer)
    if not attached:
        return
    inside_out = sorted(attached, key=lambda each: each.acts)
    if list(before)[-len(inside_out) :] != [each.key_before for each in inside_out]:
        for each in inside_out:
            before.move_to_end(each.key_before)
    if list(after)[: len(inside_out)] != [each.key_after for each in reversed(inside_out)]:
        for each in inside_out:
            after.move_to_end(each.key_after, last=False)


def _is_stepping(optimizer: Optimizer, besides: int = 0) -> bool:
    """Whether more than `besides` calls of the optimizer's `step` are on the stack of this thread."""
    found, frame = 0, sys._getframe(1)
    while frame is not None:
        if frame.f_code is HOOKED_STEP and frame.f_locals.get("self") is optimizer:
            found += 1
        frame = frame.f_back  # type: ignore[assignment]
    return found > besides


def _is_in_step() -> bool:
    """Whether the `step` of any optimizer is on the stack of this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is HOOKED_STEP:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
