"""`attach`: guard or watch one optimizer, whoever calls its `step`.

Two hooks that torch runs around every step of the optimizer do the work: user code, `GradScaler.step`, Lightning with a
closure, the HF Trainer through Accelerate and a scheduler that has wrapped `step` all go through them. Nothing of the
optimizer is replaced, so `state_dict`, `copy.deepcopy` and `pickle` work as before, and `detach` removes the hooks.

The first hook measures the gradients and decides (`GuardedOptimizer.begin`). What it changes for the length of the step
is put back by the second (`GuardedOptimizer.end`):

- A fused optimizer is given `grad_scale` and `found_inf`, combined with those of a `GradScaler`. The host waits for
  nothing.
- For any other optimizer the gradients are clipped in place. If the step is refused, they are taken away for the call,
  so that the optimizer does nothing; an optimizer that is not torch's might still do something (decay weights, count
  steps), so its parameters and state are copied before the call and restored after it.
- A closure is replaced by one that calls it and decides afterwards.

The hooks run last before the step and first after it, whatever other hooks are registered and in whatever order. If a
step raises, torch does not run the second hook; what was changed is then put back at the next step or by `detach`.

Not covered: a step inside `torch.compile`, a graph capture or a dispatch mode runs unguarded (one warning), and an
optimizer that is no `torch.optim.Optimizer` has no hooks.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from surefoot.act.apply import StepCopy, hide_gradients
from surefoot.core.device import is_capturing
from surefoot.core.weak_reference import IdentityMap
from surefoot.decide.recovery import Escalation
from surefoot.errors import SettingError, TrainingHalted, UsageError, require
from surefoot.guard.context import build_guard
from surefoot.guard.guarded_optimizer import ClosureStep, GuardedOptimizer, OpenStep, StepFacts
from surefoot.guard.incident_capture import IncidentCapture, RunToCapture, keeper_for
from surefoot.guard.loop_capture import LoopCapture, optimizer_steps
from surefoot.guard.run_actions import halt_message
from surefoot.guard.step_decision import StepNumbers
from surefoot.guard.step_results import StepResults
from surefoot.observe.parameters import BackwardOrder, Layout
from surefoot.observe.without_hooks import WithoutHooks, runs_eagerly
from surefoot.record.incidents.retention import IncidentKeeper
from surefoot.types import Incident, Scalar, Signals, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike
    from pathlib import Path

    from torch.utils.hooks import RemovableHandle

    from surefoot.detect.checker import StabilityChecker
    from surefoot.guard.step_decision import StepDecision
    from surefoot.guard.step_results import Respond
    from surefoot.observe.tensors import LayerMetrics
    from surefoot.record.log import RunLog
    from surefoot.types import Clipper, Decision, Shaper

log = logging.getLogger("surefoot")

Mode: TypeAlias = Literal["guard", "watch"]


def _run_directly(hook: Callable[..., Any], *args: Any) -> Any:
    return hook(*args)


def attach(
    model: nn.Module | Sequence[nn.Module] | None,
    optimizer: Any,
    *,
    mode: Mode = "guard",
    clip: Clipper | Shaper | Sequence[Clipper | Shaper] | None = None,
    checker: StabilityChecker | None = None,
    escalation: Escalation | None = Escalation(),  # noqa: B008 (frozen)
    incidents: IncidentKeeper | str | Path | None = None,
    log: str | PathLike[str] | RunLog | None = None,
    watch: LayerMetrics | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    on_event: Callable[[Incident], None] | None = None,
    decide_on: Literal["auto", "host", "device"] = "auto",
    lag_steps: int = 4,
    name_of: Callable[[Tensor], str | None] | None = None,
    announce: bool = True,
    on_decision: Callable[[StepDecision], None] | None = None,
    run_hook: Callable[..., Any] = _run_directly,
) -> Attachment:
    """Guard every step of an optimizer, whoever calls it, until `detach()`.

    >>> import torch, surefoot as sf
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> attachment = sf.attach(model, optimizer, clip=sf.ClipByNorm(1.0))
    >>> model(torch.full((8, 4), float("nan"))).mean().backward()
    >>> optimizer.step()  # not applied: the gradients are NaN
    >>> attachment.counts["skipped"]
    1

    Neither model nor optimizer is kept alive by the attachment, and dropping the attachment does not detach it.

    Args:
        model: the module that the optimizer trains, or several; names of parameters come from it, and with
            `mode="guard"` its buffers are restored when a step is refused. `None` if it is not known.
        optimizer: a `torch.optim.Optimizer`, or a wrapper of Accelerate's or Lightning's around one.
        mode: `"guard"` skips broken steps and clips. `"watch"` measures and decides, and changes nothing: parameters
            stay bitwise those of the bare script, no collective is started, and a record says in `reasons` what would
            have refused the step.
        clip: a clipper, or shapers followed by a clipper. Only with `mode="guard"`.
        checker: the detectors and their thresholds.
        escalation: budgets for refused steps. When they are used up the learning rate is cut for the length of each
            step, and in the end `optimizer.step()` raises `TrainingHalted`. `None` skips indefinitely. Watching does
            not escalate.
        incidents: a run folder, or a keeper with settings of its own: the first of consecutive refused steps is kept
            there with all that `surefoot replay` needs to run it again. Only with `mode="guard"` and a model.
        log: the run folder that every step and event is written to, or a `RunLog`; several attachments may share one.
        watch: what to measure per layer beyond the gradients.
        on_step: called with the record of each step once its numbers have arrived.
        on_event: called with each incident.
        decide_on: where a step is decided. `"host"` reads its numbers at once; `"device"` reads none until
            `lag_steps` later. `"auto"`: host on a CPU, device elsewhere.
        lag_steps: how many steps later the host reads a step that was decided on the device.
        name_of: names parameters that belong to none of the models.
        announce: whether each incident is logged as a warning.
        on_decision: called between the decision and the optimizer's step, for what must be done before the step is
            applied. On the device the numbers of the decision are tensors.
        run_hook: called as `run_hook(hook, *args)` for every hook, and returns what the hook returns. `surefoot run`
            runs them as it runs its probes.
    """
    models = [] if model is None else [model] if isinstance(model, nn.Module) else list(model)
    optimizer = _unwrapped(optimizer)
    keeper = keeper_for(incidents)
    _check(models, optimizer, mode, clip, decide_on, lag_steps)
    _check_keeper(keeper, models, mode)
    acts = mode == "guard"
    layout = Layout(models, optimizer, *([name_of] if name_of is not None else []))
    require(bool(layout.parameters), "the optimizer has no parameters.")
    require(
        not (acts and models) or layout.known > 0,
        f"the optimizer's {len(layout.parameters)} parameters are none of the model's. Pass the model that it trains, "
        "or `None`.",
    )
    guard = build_guard(
        models,
        optimizer,
        layout,
        acts=acts,
        clip=clip,
        checker=checker,
        escalation=escalation,
        watch=watch,
        decide_on=decide_on,
        lag_steps=lag_steps,
        log=log,
        samples_model=False,
        # Whoever runs the hooks handles the errors of its own functions too.
        on_step=_safe(on_step, "on_step") if run_hook is _run_directly else on_step,
        on_event=_safe(on_event, "on_event") if run_hook is _run_directly else on_event,
        announce=announce,
    )
    capture = follower = None
    if keeper is not None:
        settings = {
            "guard": "attach",
            "decide_on": "device" if guard.decides_on_device else "host",
            "shapers": guard.shapers,
        }
        run = RunToCapture(models, optimizer, None, guard, settings, is_bare=True)
        capture = IncidentCapture(keeper, run, guard.lag_steps)
        follower = LoopCapture(capture, run)
    results = StepResults(
        models if acts else (),
        guard.history,
        guard.lag_steps,
        respond=_respond if capture is None else _capturing(capture, _respond),
        on_step=guard.on_step,
        restore_after_overflow=False,
    )
    if guard.log is not None:
        guard.log.before_close(results.report_rest)
    hooks = _StepHooks(optimizer, guard.guarded, results, guard.order, follower, on_decision, run_hook, acts=acts)
    return Attachment(optimizer, hooks, results, guard.log)


class Attachment:
    """A guard that is attached to one optimizer. Keeps neither the optimizer nor the model alive."""

    def __init__(self, optimizer: Optimizer, hooks: _StepHooks, results: StepResults, log: RunLog | None) -> None:
        self._optimizer, self._hooks = weakref.ref(optimizer), weakref.ref(hooks)
        self._results = results
        self.log = log
        """The run log, if there is one."""

    @property
    def attached(self) -> bool:
        """Whether steps of the optimizer still go through this guard."""
        hooks = self._hooks()
        return hooks is not None and hooks.active

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, while it is alive."""
        return self._optimizer()

    def detach(self) -> None:
        """Remove the hooks and read what has not been read yet. May be called more than once."""
        hooks = self._hooks()
        if hooks is not None:
            hooks.remove()
        _ORDER.end_if_unused()
        self._results.drain()

    def settle(self) -> None:
        """Read the steps that have not been read yet. Waits for the device."""
        self._results.drain()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def observe(self, *, loss: Scalar | None = None, **signals: Scalar) -> None:
        """Give the next step its loss, which the optimizer does not know, and signals of your own."""
        hooks = self._hooks()
        if hooks is not None:
            hooks.signals.observe(loss, signals)

    def skipped_by_scaler(self, loss_scale: float = 1.0) -> None:
        """Count a step that a `GradScaler` has skipped without calling the optimizer, because of an overflow.

        An optimizer that is not fused is not called then, so that no hook runs.
        """
        hooks = self._hooks()
        if hooks is not None and hooks.active:
            hooks.skipped_by_scaler(loss_scale)

    # ---- what happened: reading changes nothing, and waits for numbers that have not arrived -------------------------

    @property
    def steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._results.steps

    @property
    def history(self) -> list[StepRecord]:
        """The last 1,000 steps, oldest first, the last 100 with their layers."""
        return list(self._results.seen().history)

    @property
    def incidents(self) -> list[Incident]:
        """What a person should know about, oldest first; the last 200."""
        return list(self._results.seen().incidents)

    @property
    def counts(self) -> dict[str, int]:
        """Steps, applied, skipped, clipped, overflows, alarms."""
        return dict(self._results.seen().counts)


class _StepSignals:
    """The loss and the user's own signals for the next step, which the optimizer does not know."""

    def __init__(self) -> None:
        self.loss: Scalar | None = None
        self.own: dict[str, Scalar] = {}

    def observe(self, loss: Any, signals: dict[str, Scalar]) -> None:
        """Keep a loss, unless it is `None` or no number, and signals."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.loss = loss.detach().reshape(())
        elif isinstance(loss, (int, float)):
            self.loss = float(loss)
        for name, value in signals.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise UsageError(f"signal {name!r} must be one number; got a tensor of shape {tuple(value.shape)}.")
            self.own[name] = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)

    def facts(self, step: int, lr_factor: float, home: torch.device) -> StepFacts:
        """What is known of the next step."""
        loss = torch.full((), self.loss, device=home) if isinstance(self.loss, float) else self.loss
        return StepFacts(step, loss, 1.0, self.own, lr_factor)


class _StepHooks:
    """The two hooks of one attachment, with what they need. Belongs to the optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        guarded: GuardedOptimizer,
        results: StepResults,
        order: BackwardOrder,
        capture: LoopCapture | None,
        on_decision: Callable[[StepDecision], None] | None,
        run_hook: Callable[..., Any],
        *,
        acts: bool,
    ) -> None:
        self._guarded, self._results, self._order, self.acts = guarded, results, order, acts
        self._capture, self._on_decision, self._run_hook = capture, on_decision, run_hook
        self.active = True
        self._depth = 0
        """How many calls of `step` are under way: a subclass may call the `step` of its base."""
        self._open: OpenStep | ClosureStep | None = None
        self.signals = _StepSignals()
        self._warned = False
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(partial(run_hook, self.before)),
            optimizer.register_step_post_hook(partial(run_hook, self.after)),
        ]
        self.key_before, self.key_after = (handle.id for handle in self._handles)
        _HOOKS.set(optimizer, [*(_HOOKS.get(optimizer) or ()), self])
        _put_in_order(optimizer, (), {})
        _ORDER.begin()

    def remove(self) -> None:
        """Take the hooks off, at once or, from inside a step, before the next one."""
        self.active = False
        self._order.stop()
        if self._capture is not None:
            self._capture.close()
        optimizer = self._guarded.optimizer
        if self._depth and (optimizer is None or _is_stepping(optimizer)):
            return
        self._abandon()
        for handle in self._handles:
            handle.remove()
        if optimizer is not None:
            _HOOKS.set(optimizer, [hooks for hooks in _HOOKS.get(optimizer) or () if hooks is not self])

    # ---- around a step ----------------------------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the step: decide, or replace the closure by one after which it is decided."""
        if not self.active or not self._can_run():
            return None
        if self._depth:
            if _is_stepping(optimizer, besides=1):
                self._depth += 1
                return None
            self._abandon()  # the step before has raised
        self._depth = 1
        try:
            return self._before(args, kwargs)
        except Exception as error:
            if self.acts:
                self._abandon()
                raise
            self._give_up(error)
        return None

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """After the step: put back what was changed for it, and take the result in."""
        if self._depth != 1:
            self._depth = max(self._depth - 1, 0)
            return
        step, self._open, self._depth = self._open, None, 0
        try:
            if step is None:
                return
            with WithoutHooks():
                numbers = step.end() if isinstance(step, ClosureStep) else self._guarded.end(step)
                if self.active and self._capture is not None and numbers is not None:
                    self._capture.decided(step, numbers, self._results.buffers)
            if self.active:
                self._take(numbers or self._without_gradient())
        except TrainingHalted:
            raise
        except Exception as error:
            if self.acts:
                raise
            self._give_up(error)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with WithoutHooks():
            self._guarded.look_for_new_parameters()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._begin()
            return None
        if self._capture is not None:
            closure = self._capture.followed(closure)
        replaced = self._decided(closure)
        if len(args) > 1:
            return (args[0], replaced, *args[2:]), kwargs
        return args, {**kwargs, "closure": replaced}

    def _begin(self) -> None:
        """Decide on the gradients as they are now; a refused step is made to do nothing."""
        with WithoutHooks():
            self._open = step = self._guarded.begin(self._facts())
            if self._on_decision is not None and step.decision is not None:
                self._on_decision(step.decision)
            if not step.refused:
                return
            layout, optimizer = self._guarded.layout, self._guarded.optimizer
            if not _is_torchs(optimizer):
                step.undo.callback(StepCopy(layout.parameters, optimizer).restore)
            hide_gradients(step.undo, [parameter for _, parameter in layout.parameters])

    def _facts(self, loss: Any = None) -> StepFacts:
        self.signals.observe(loss, {})
        return self.signals.facts(self._results.steps, self._results.lr_factor, self._guarded.layout.home)

    def _decided(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, with the decision after its first evaluation."""
        if self.acts and not (_is_torchs(self._guarded.optimizer) and _evaluates_first(self._guarded.optimizer)):
            with WithoutHooks():
                self._open = step = ClosureStep(self._guarded, closure, self._facts, raises=False)
            return self._cancelling(step)
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
        try:
            self.signals.observe(loss, {})
            self._begin()
        except Exception as error:
            if self.acts:
                self._abandon()
                raise
            self._give_up(error)

    def _cancelling(self, step: ClosureStep) -> Callable[[], Any]:
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            except BaseException:
                step.cancel()
                self._open, self._depth = None, 0
                raise

        return evaluate

    def _abandon(self) -> None:
        """Put back what was changed for a step that has raised."""
        step, self._open, self._depth = self._open, None, 0
        if isinstance(step, OpenStep):
            step.undo.close()
        elif step is not None:
            step.cancel()

    def _give_up(self, error: Exception) -> None:
        """Watching never ends a run: it ends itself, with one warning, or as whoever runs the hooks handles it."""
        self._abandon()
        self.active = False
        if self._run_hook is not _run_directly:
            raise error
        log.warning(
            "surefoot: %s is no longer watched (%s: %s); training goes on.",
            type(self._guarded.optimizer).__name__,
            type(error).__name__,
            " ".join(str(error).split())[:300],
            exc_info=error,
        )

    def _can_run(self) -> bool:
        if torch.compiler.is_compiling():
            return False
        if runs_eagerly() and not is_capturing(self._guarded.layout.home):
            return True
        if not self._warned and self.acts:
            self._warned = True
            log.warning(
                "surefoot: steps of %s that run inside a dispatch mode, a trace or a graph capture are not guarded.",
                type(self._guarded.optimizer).__name__,
            )
        return False

    # ---- results ----------------------------------------------------------------------------------------------------

    def _without_gradient(self) -> StepNumbers:
        signals = Signals(self._results.steps, lr=self._guarded.lr(self._results.lr_factor))
        summary = "no parameter of the optimizer has a gradient"
        self._results.history.warn_once(signals, "optim.no-gradient", summary)
        return StepNumbers(StepRecord(signals, skipped=False))

    def skipped_by_scaler(self, loss_scale: float) -> None:
        """A step was skipped without a call of the optimizer."""
        lr = self._guarded.lr(self._results.lr_factor)
        loss = None if self.signals.loss is None else float(self.signals.loss)
        signals = Signals(self._results.steps, loss, lr=lr, loss_scale=float(loss_scale))
        self._take(StepNumbers(StepRecord(signals, skipped=True, overflow=True)))

    def _take(self, numbers: StepNumbers) -> None:
        self._order.stop()
        self.signals = _StepSignals()
        with WithoutHooks():
            if self._capture is not None:
                self._capture.begin(self._results.steps + 1)
            self._results.take(numbers)


# ---- where the hooks stand among others ----------------------------------------------------------------------------

_HOOKS: IdentityMap[list[_StepHooks]] = IdentityMap()


class _HookOrder:
    """The hook that torch runs before the step of every optimizer, while there is an attachment."""

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        self.stays = False
        """Whether it stays without an attachment."""

    def begin(self) -> None:
        """Have the order of hooks kept."""
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(_put_in_order)

    def end_if_unused(self) -> None:
        """Remove the hook with the last attachment, but not while torch goes through the hooks of a step."""
        if self._handle is not None and not self.stays and not any(_HOOKS.values()) and not _is_in_step():
            self._handle.remove()
            self._handle = None


_ORDER = _HookOrder()


def keep_hook_order() -> None:
    """Have the order of the hooks kept for the rest of the process: needed before one attaches inside a step."""
    _ORDER.stays = True
    _ORDER.begin()


def _put_in_order(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before any hook of the optimizer runs: ours come last before the step and first after it.

    What others do to the gradients is then part of what is decided on, and what was changed for the step is put back
    before they look. Watching comes before guarding, to see the gradients as they are.
    """
    if torch.compiler.is_compiling():
        return
    optimizer_steps(optimizer)
    for hooks in _HOOKS.get(optimizer) or ():
        if not hooks.active:
            hooks.remove()
    attached = _HOOKS.get(optimizer)
    if not attached:
        return
    inside_out = sorted(attached, key=lambda each: each.acts)
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    if list(before)[-len(inside_out) :] != [each.key_before for each in inside_out]:
        for each in inside_out:
            before.move_to_end(each.key_before)
    if list(after)[: len(inside_out)] != [each.key_after for each in reversed(inside_out)]:
        for each in inside_out:
            after.move_to_end(each.key_after, last=False)


def _is_stepping(optimizer: Optimizer, besides: int = 0) -> bool:
    """Whether more than `besides` calls of the optimizer's `step` are on the stack of this thread."""
    code, found, frame = getattr(type(optimizer).step, "__code__", None), 0, sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is optimizer:
            found += 1
        frame = frame.f_back  # type: ignore[assignment]
    return found > besides


_WRAPPERS = {each for each in Optimizer.profile_hook_step.__code__.co_consts if isinstance(each, CodeType)}
"""The code of the function that torch puts around every `step`, which runs the hooks."""


def _is_in_step() -> bool:
    """Whether the `step` of any optimizer is on the stack of this thread, as far as that can be known."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _WRAPPERS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return not _WRAPPERS


# ---- construction --------------------------------------------------------------------------------------------------


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a wrapper, as Accelerate and Lightning put around one."""
    while "_optimizer_step_pre_hooks" not in getattr(optimizer, "__dict__", {}):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or inner is optimizer:
            raise SettingError(
                f"`optimizer` must be a torch.optim.Optimizer, whose hooks `attach` uses; got "
                f"{type(optimizer).__name__}. For an optimizer of another kind use TrainingStabilizer."
            )
        optimizer = inner
    return optimizer


def _check(
    models: Sequence[object], optimizer: Any, mode: object, clip: object, decide_on: object, lag_steps: object
) -> None:
    for model in models:
        require(
            isinstance(model, nn.Module), f"`model` must be a torch.nn.Module or several; got {type(model).__name__}."
        )
    require(mode in ("guard", "watch"), f"`mode` must be 'guard' or 'watch'; got {mode!r}.")
    require(mode == "guard" or clip is None, "`clip` changes gradients: use mode='guard'.")
    require(
        decide_on in ("auto", "host", "device"), f"`decide_on` must be 'auto', 'host' or 'device'; got {decide_on!r}."
    )
    require(isinstance(lag_steps, int) and lag_steps >= 0, f"`lag_steps` must not be negative; got {lag_steps!r}.")
    require(
        getattr(type(optimizer).step, "hooked", False),
        f"the `step` of {type(optimizer).__name__} runs no hooks: its __init__ does not call that of Optimizer.",
    )
    if mode == "guard" and any(hooks.acts and hooks.active for hooks in _HOOKS.get(optimizer) or ()):
        raise UsageError("the optimizer is guarded already. Call `detach()` on the attachment it has first.")


def _check_keeper(keeper: object, models: Sequence[nn.Module], mode: Mode) -> None:
    if keeper is None:
        return
    require(
        isinstance(keeper, IncidentKeeper),
        f"`incidents` must be a folder or an IncidentKeeper; got {type(keeper).__name__}.",
    )
    require(mode == "guard", "`incidents` keeps steps that are refused: use mode='guard'.")
    require(
        bool(models), "`incidents` keeps the weights before a refused step: pass the model that the optimizer trains."
    )


def _capturing(capture: IncidentCapture, respond: Respond) -> Respond:
    """Write the incident of a refused step before anything is done about it. The capture is not kept alive."""
    reference = weakref.ref(capture)

    def capturing(results: StepResults, record: StepRecord, decision: Decision) -> None:
        alive = reference()
        if record.skipped and alive is not None:
            alive.refused(record, results.pending)
        respond(results, record, decision)

    return capturing


def _is_torchs(optimizer: Any) -> bool:
    """Whether `step` is torch's own, which does nothing where there is no gradient."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _evaluates_first(optimizer: Any) -> bool:
    """Whether a `step` of torch's calls its closure once, before it touches anything."""
    return not isinstance(optimizer, torch.optim.LBFGS)


def _respond(results: StepResults, record: StepRecord, decision: Decision) -> None:
    results.lr_factor = decision.lr_factor
    if decision.action == "halt":
        history, budgets = results.history, results.history.budgets
        broken = budgets.agreed(budgets.weights_broken())
        raise TrainingHalted(halt_message(history, decision.reason, broken), history.incidents[-1])


def _safe(function: Callable[[Any], None] | None, name: str) -> Callable[[Any], None] | None:
    """The user's function; once it raises, it is not called any more, and training goes on."""
    if function is None:
        return None
    failed = False

    def call(value: Any) -> None:
        nonlocal failed
        if failed:
            return
        try:
            function(value)
        except Exception as error:
            failed = True
            log.warning("surefoot: `%s` raised, and is no longer called: %s", name, error, exc_info=error)

    return call
