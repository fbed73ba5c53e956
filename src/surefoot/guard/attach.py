"""`attach`: guard or watch every `step` of one optimizer, in user code or in a trainer.

Two hooks that torch runs around every step of the optimizer do the work (`guard/step_hooks.py`): user code,
`GradScaler.step`, Lightning with a closure, the HF Trainer through Accelerate and a scheduler that has wrapped `step`
all go through them. Nothing of the optimizer is replaced, so `state_dict`, `copy.deepcopy` and `pickle` work as before,
and `detach` removes the hooks. One hook that torch runs for all optimizers stays, and does nothing for those that have
no attachment.

Not covered: a step inside `torch.compile`, a graph capture or a dispatch mode runs unguarded (one warning), and an
optimizer that is not a `torch.optim.Optimizer` has no hooks.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from surefoot.core.settings import shown
from surefoot.decide.recovery import Escalation, TrainingRecovery
from surefoot.decide.unguardable import check_optimizer
from surefoot.detect.checker import StabilityChecker
from surefoot.errors import SettingError, TrainingHalted, UsageError, require
from surefoot.guard.attached_recovery import AttachedRecovery, recovering
from surefoot.guard.context import GuardSettings, build_guard
from surefoot.guard.guard_state import in_present_format, load_state, read_state, settled_state
from surefoot.guard.incident_capture import IncidentCapture, RunToCapture, keeper_for
from surefoot.guard.loop_capture import LoopCapture
from surefoot.guard.run_actions import halt_message
from surefoot.guard.step_hooks import HOOK_ORDER, StepAccount, StepHooks, hooks_of, run_directly
from surefoot.guard.step_results import StepResults
from surefoot.guard.validation import check_kinds, check_lag, check_values, models_of, signal_value
from surefoot.observe.parameters import Layout
from surefoot.observe.tensors import LayerMetrics
from surefoot.record.incidents.bundle import IncidentKeeper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike
    from pathlib import Path

    from torch.optim.optimizer import Optimizer

    from surefoot.guard.context import GuardContext, Mode
    from surefoot.guard.step_results import Respond
    from surefoot.record.log import RunLog
    from surefoot.types import Clipper, Decision, Incident, Scalar, Shaper, StepRecord

logger = logging.getLogger("surefoot")


def attach(
    model: nn.Module | Sequence[nn.Module] | None,
    optimizer: Any,
    *,
    mode: Mode = "guard",
    clip: Clipper | Shaper | Sequence[Clipper | Shaper] | None = None,
    checker: StabilityChecker | None = None,
    escalation: Escalation | None = Escalation(),  # noqa: B008 (frozen)
    recovery: TrainingRecovery | None = None,
    incidents: IncidentKeeper | str | Path | None = None,
    log: str | PathLike[str] | RunLog | None = None,
    watch: LayerMetrics | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    on_event: Callable[[Incident], None] | None = None,
    decide_on: Literal["auto", "host", "device"] = "auto",
    lag_steps: int = 4,
) -> Attachment:
    """Guard every step of an optimizer, in your code or in a trainer, until `detach()`.

    >>> import torch, surefoot as sf
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> attachment = sf.attach(model, optimizer, clip=sf.ClipByNorm(1.0))
    >>> model(torch.full((8, 4), float("nan"))).mean().backward()
    >>> optimizer.step()  # not applied: the gradients are NaN
    >>> attachment.counts["skipped"]
    1

    Args:
        model: the model that the optimizer trains, or several. Parameters are named after it, and its buffers are
            restored when a step is refused. `None` if it is not known.
        optimizer: a `torch.optim.Optimizer`, or a wrapper of Accelerate's or Lightning's around one.
        mode: `"guard"` skips broken steps, clips and recovers. `"watch"` measures and decides, but changes nothing: a
            record names in `reasons` what would have refused the step, and no collective is started.
        clip: a clipper, or shapers followed by a clipper.
        checker: the detectors and their thresholds.
        escalation: budgets for refused steps. When they are used up, the learning rate is cut for each step, and
            finally `optimizer.step()` raises `TrainingHalted`. `None` skips indefinitely. Watching does not escalate.
        recovery: returns to earlier weights, kept in memory, when skipping does not help. Needs the loss of each step.
        incidents: a run folder or a keeper. Captures what `surefoot replay` needs of the first of consecutive refused
            steps.
        log: the run folder that steps and events are written to, or a `RunLog`, which attachments may share.
        watch: what to measure per layer beyond the gradients.
        on_step, on_event: called with the record of each step once its numbers have arrived, and with each incident.
        decide_on, lag_steps: `"host"` reads a step at once, `"device"` `lag_steps` later. `"auto"`: host on a CPU.
    """
    settings = GuardSettings(
        mode, clip, checker, escalation, recovery, incidents, log, watch, on_step, on_event, decide_on, lag_steps
    )
    return attach_with(model, optimizer, settings)


def attach_with(model: nn.Module | Sequence[nn.Module] | None, optimizer: Any, settings: GuardSettings) -> Attachment:
    """The implementation of `attach`, with all settings."""
    models = [] if model is None else models_of(model)
    optimizer = _unwrapped(optimizer)
    keeper = keeper_for(settings.incidents)
    _check(models, optimizer, settings)
    _check_keeper(keeper, models, settings.mode)
    guard = _built(models, optimizer, settings)
    capture = follower = None
    if keeper is not None:
        run = RunToCapture(models, optimizer, None, guard, {"guard": "attach"}, is_bare=True)
        capture = IncidentCapture(keeper, run, guard.lag_steps, guard.rows)
        follower = LoopCapture(capture, run)
    respond: Respond = _respond
    recovery = None
    if settings.recovery is not None:
        recovery = AttachedRecovery(models, optimizer, guard, settings.recovery)
        respond = recovering(recovery, _respond)
    results = StepResults(
        models if settings.acts else (),
        guard.history,
        guard.lag_steps,
        respond=respond if capture is None else _capturing(capture, respond),
        on_step=guard.on_step,
        restore_after_overflow=False,
    )
    if guard.log is not None:
        guard.log.before_close(results.report_rest)
        if guard.rows is not None:
            guard.log.before_close(guard.rows.release)
    account = StepAccount(guard.guarded, results, guard.order, follower, recovery)
    hooks = StepHooks(optimizer, guard, account, follower, settings.on_decision, settings.run_hook, acts=settings.acts)
    return Attachment(optimizer, hooks, results, guard.log)


def _built(models: Sequence[nn.Module], optimizer: Any, settings: GuardSettings) -> GuardContext:
    layout = Layout(models, optimizer, *([settings.name_of] if settings.name_of is not None else []))
    require(bool(layout.parameters), "the optimizer has no parameters.")
    require(
        not (settings.acts and models) or layout.known > 0,
        f"the optimizer's {len(layout.parameters)} parameters do not belong to the model. Pass the model that it "
        "trains, or `None`.",
    )
    if settings.acts:
        check_values(layout)
    if settings.run_hook is run_directly:  # otherwise the code that runs the hooks also handles these errors
        on_step, on_event = _safe(settings.on_step, "on_step"), _safe(settings.on_event, "on_event")
        settings = replace(settings, on_step=on_step, on_event=on_event)
    return build_guard(models, optimizer, layout, replace(settings, samples_model=False))


class Attachment:
    """A guard that is attached to one optimizer.

    It keeps neither model nor optimizer alive, and dropping it does not detach it.
    """

    def __init__(self, optimizer: Optimizer, hooks: StepHooks, results: StepResults, log: RunLog | None) -> None:
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
        HOOK_ORDER.end_if_unused()
        self._results.drain()
        self._results.forget_models()

    def settle(self) -> None:
        """Read the steps that have not been read yet. Waits for the device."""
        self._results.drain()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def observe(self, *, loss: Scalar | None = None, clip_factor: Scalar | None = None, **signals: Scalar) -> None:
        """Pass the loss of the next step, which the optimizer does not have, and your own signals.

        `clip_factor` is the factor, above 0, that you have multiplied the gradients by to clip them: the step is judged
        and logged with the gradients before clipping. A tensor is not read; a factor that gradients cannot be divided
        by (0, NaN) counts as unknown.
        """
        hooks = self._hooks()
        if hooks is not None:
            hooks.account.observe(None if loss is None else signal_value("loss", loss), signals)
            if clip_factor is not None:
                hooks.account.clipped(clip_factor)

    def skipped_by_scaler(self, loss_scale: float = 1.0) -> None:
        """Count a step that a `GradScaler` has skipped without calling the optimizer, because of an overflow.

        In that case an optimizer that is not fused is not called, so no hook runs.
        """
        hooks = self._hooks()
        if hooks is not None and hooks.active:
            hooks.account.skipped_by_scaler(loss_scale)

    # ---- the state of the guard, to be saved with the run -----------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the rules, the budgets and the counts, as tensors and plain values without pickle."""
        return dict(settled_state(read_state(_guard_of(self._hooks()), self._results)))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved guard stopped; load model and optimizer first. Parts with new settings start again.

        Earlier states in memory are not part of it.
        """
        load_state(_guard_of(self._hooks()), self._results, in_present_format(state))

    # ---- results: reading changes nothing, and waits for numbers that have not arrived ------------------------------

    @property
    def steps(self) -> int:
        """The number of optimizer steps so far, including skipped ones."""
        return self._results.steps

    @property
    def history(self) -> list[StepRecord]:
        """The last 1,000 steps, oldest first, the last 100 with their layers."""
        return list(self._results.seen().history)

    @property
    def incidents(self) -> list[Incident]:
        """The last 200 incidents, oldest first."""
        return list(self._results.seen().incidents)

    @property
    def counts(self) -> dict[str, int]:
        """Steps, applied, skipped, clipped, overflows, alarms."""
        return dict(self._results.seen().counts)


def account_of(attachment: Attachment) -> StepAccount | None:
    """The data of the next step, for adapters; `None` if the optimizer no longer exists."""
    hooks = attachment._hooks()
    return None if hooks is None else hooks.account


def _guard_of(hooks: StepHooks | None) -> GuardContext:
    if hooks is None:
        raise UsageError("the optimizer was deleted or detached, so its guard has no state.")
    return hooks.guard


# ---- construction --------------------------------------------------------------------------------------------------


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a wrapper of Accelerate or Lightning."""
    while "_optimizer_step_pre_hooks" not in getattr(optimizer, "__dict__", {}):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or inner is optimizer:
            raise SettingError(
                f"`optimizer` must be a torch.optim.Optimizer, whose hooks `attach` uses; got "
                f"{type(optimizer).__name__}. For an optimizer of another kind use TrainingStabilizer."
            )
        optimizer = inner
    return optimizer


def _check(models: Sequence[object], optimizer: Any, settings: GuardSettings) -> None:
    for model in models:
        require(
            isinstance(model, nn.Module), f"`model` must be a torch.nn.Module or several; got {type(model).__name__}."
        )
    kinds = {"checker": StabilityChecker, "escalation": Escalation, "recovery": TrainingRecovery, "watch": LayerMetrics}
    check_kinds({name: (getattr(settings, name), kind) for name, kind in kinds.items()})
    for name in ("on_step", "on_event"):
        function = getattr(settings, name)
        require(function is None or callable(function), f"`{name}` must be a function; got {shown(function)}.")
    require(settings.recovery is None or settings.acts, "`recovery` changes weights: use mode='guard'.")
    mode, decide_on = settings.mode, settings.decide_on
    require(mode in ("guard", "watch"), f"`mode` must be 'guard' or 'watch'; got {mode!r}.")
    require(mode == "guard" or settings.clip is None, "`clip` changes gradients: use mode='guard'.")
    require(
        decide_on in ("auto", "host", "device"), f"`decide_on` must be 'auto', 'host' or 'device'; got {decide_on!r}."
    )
    check_lag(settings.lag_steps)
    if settings.acts and models:
        check_optimizer(optimizer, keeps_states=settings.recovery is not None)
    require(
        getattr(type(optimizer).step, "hooked", False),
        f"the `step` of {type(optimizer).__name__} runs no hooks: its __init__ does not call that of Optimizer.",
    )
    if settings.acts and any(hooks.acts and hooks.active for hooks in hooks_of(optimizer)):
        raise UsageError(
            "the optimizer is already guarded. First call `detach()` on its attachment, or "
            "`sf.trainers.accelerate.end(accelerator)` if that attached it."
        )


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
    """Write the incident of a refused step before any response to it. The capture is not kept alive."""
    reference = weakref.ref(capture)

    def capturing(results: StepResults, record: StepRecord, decision: Decision) -> None:
        alive = reference()
        if record.skipped and alive is not None:
            alive.refused(record, results.pending)
        respond(results, record, decision)

    return capturing


def _respond(results: StepResults, record: StepRecord, decision: Decision) -> None:
    results.lr_factor = decision.lr_factor
    if decision.action == "halt":
        history, budgets = results.history, results.history.budgets
        broken = budgets.agreed(budgets.weights_broken())
        raise TrainingHalted(halt_message(history, decision.reason, broken), history.incidents[-1])


def _safe(function: Callable[[Any], None] | None, name: str) -> Callable[[Any], None] | None:
    """The user's function. If it raises, it is not called again, and training continues."""
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
            logger.warning("surefoot: `%s` raised an error and is no longer called: %s", name, error, exc_info=error)

    return call
