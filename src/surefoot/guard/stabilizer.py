"""`TrainingStabilizer`: everything between `loss.backward()` and `optimizer.step()`, in the user's own loop.

It is the guard that `attach` adds to an optimizer (`guard/context.py`), plus backward, accumulation, scheduling,
checkpoints and recovery. This file combines all stages:

    tensors ─observe─▶ Signals ─detect─▶ Verdict ─decide─▶ Decision ─act─▶ Outcome

Each step the gradients are measured in one pass, decided on, clipped, and applied or skipped. On a GPU with a fused
optimizer, all of that stays on the device: the host reads the step's numbers `lag_steps` later. On a CPU, where reading
is free, the host decides immediately. An optimizer that is not fused needs one scalar sync per step on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from surefoot.act.apply import ClosureRefused
from surefoot.core.settings import shown
from surefoot.decide.agreement import set_gradient_sync
from surefoot.decide.recovery import Escalation, TrainingRecovery
from surefoot.detect.checker import StabilityChecker
from surefoot.errors import RankFailed, UsageError
from surefoot.guard.backward import GradientWarnings, GradientWindow
from surefoot.guard.closure_step import ClosureStep
from surefoot.guard.context import GuardContext, GuardSettings, build_guard
from surefoot.guard.data_loop import LoopHooks
from surefoot.guard.dead_layers import DeadLayers
from surefoot.guard.global_batch import GlobalBatch
from surefoot.guard.guard_state import in_present_format, load_rules, load_state, read_state
from surefoot.guard.guarded_optimizer import StepFacts
from surefoot.guard.incident_capture import IncidentCapture, RunToCapture, keeper_for
from surefoot.guard.other_steps import OtherSteps
from surefoot.guard.persistence import RunPersistence
from surefoot.guard.run_actions import RunActions, save_before, stop_if_asked
from surefoot.guard.run_state import OwnState, RunParts, RunState
from surefoot.guard.run_summary import RunSummary
from surefoot.guard.step_decision import StepNumbers
from surefoot.guard.step_results import StepResults, call_each, settled
from surefoot.guard.validation import check_settings, layout_of, models_of, signal_value
from surefoot.keep.checkpoint.manager import CheckpointManager
from surefoot.keep.snapshots import TrainedState
from surefoot.observe.tensors import LayerMetrics
from surefoot.record.incidents.bundle import IncidentKeeper
from surefoot.record.log import RunLog
from surefoot.record.messages import CheckpointsExpected
from surefoot.types import Incident, Outcome, Scalar, Signals, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from os import PathLike
    from pathlib import Path

    from surefoot.guard.data_loop import FollowedBatches
    from surefoot.guard.log_rows import LogRows
    from surefoot.guard.run_state import LiveStabilizerState, StabilizerState
    from surefoot.guard.validation import Precision
    from surefoot.types import Clipper, LossScaler, Shaper

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

_OUR_SIGNALS = frozenset(each.name for each in fields(Signals))
_AUTOCAST: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StabilizedRun:
    """The connected parts of a guarded loop, and one optimizer step through all of them."""

    def __init__(
        self,
        models: list[nn.Module],
        optimizer: Any,
        scheduler: Any,
        guard: GuardContext,
        *,
        accumulate: int,
        zero_grad: bool,
        recovery: TrainingRecovery | None,
        checkpoints: CheckpointManager | None,
        also_save: Mapping[str, Any] | None,
        keeper: IncidentKeeper | None,
        settings: dict[str, object],
    ) -> None:
        """Connect the parts. Incidents record `settings`."""
        self.models, self.optimizer, self.scheduler, self.guard = models, optimizer, scheduler, guard
        self._zero_grad, self._settings = zero_grad, settings
        self.own_signals: dict[str, Scalar] = {}
        history, policy, lag, ranks, rows = guard.history, guard.policy, guard.lag_steps, guard.ranks, guard.rows
        warnings = GradientWarnings(models, history)
        self.window = GradientWindow(
            models, guard.layout, policy, warnings, ranks.group, accumulate, zero_grad, guard.setup
        )
        self.capture: IncidentCapture | None = None
        if keeper is not None:
            run = RunToCapture(models, optimizer, scheduler, guard, settings)
            self.capture = IncidentCapture(keeper, run, lag, rows)
        own = OwnState(partial(self.own_state, live=True), settled_own, self.load_own_state, self._load_rules)
        batch = GlobalBatch(accumulate, self._set_accumulate)
        self.run_state = RunState(RunParts(models, optimizer, scheduler, dict(also_save or {}), own), batch)
        beside = self.run_state.following
        trained = TrainedState(models, optimizer, policy.live_states, policy.put_back, beside.read, beside.load)
        loop = _loop_hooks(self)
        self.persistence = RunPersistence(self.run_state, trained, checkpoints, recovery, lag, ranks, history, loop)
        self._others = OtherSteps(
            optimizer, scheduler, guard.layout, history, is_saved=checkpoints is not None, also_save=also_save
        )
        self._keeps_steps = checkpoints is not None or recovery is not None
        self._actions = RunActions(guard.guarded.measurer, history, self.persistence, self.capture, ranks, policy)
        on_step = call_each(guard.on_step, DeadLayers(models, history).take)
        self.results = StepResults(models, history, lag, respond=self._actions.respond, on_step=on_step)
        if self.persistence.repeats is not None:
            self.persistence.repeats.follow(self.results)
        if guard.log is not None and rows is not None:
            guard.log.before_close(self.results.report_rest)
            guard.log.before_close(rows.release)
            _log_saves(checkpoints, rows)

    def _set_accumulate(self, accumulate: int) -> None:
        """Another number of ranks uses another number of microbatches per step."""
        self.window.sums.length = self._settings["accumulate"] = accumulate
        set_gradient_sync(self.models, self.window.sums.count == accumulate - 1)

    # ---- one optimizer step -----------------------------------------------------------------------------------------

    def close_microbatch(self) -> bool:
        """Complete the microbatch; returns whether the window is complete."""
        if self.capture is not None:
            self.capture.notes.close_microbatch()
        return self.window.close_microbatch()

    def finish_window(self) -> Outcome:
        """Decide on the gradients of a complete window, and apply or skip them."""
        self._prepare()
        self.window.check_unchanged()
        self._others.check_gradients(self.results.steps)
        step = self.guard.guarded.begin(self._facts())
        try:
            if not step.refused:
                with self._others.own_step():
                    self.optimizer.step()
        except BaseException:
            step.undo.close()
            raise
        numbers = self.guard.guarded.end(step) or self._without_gradient()
        if self.capture is not None:
            self.capture.decided(numbers, step.refused_unchanged, self.results.buffers)
        if self._zero_grad:
            self.guard.layout.drop_gradients()
        return self._close_step(numbers)

    def _close_last_window(self, before: int, batches: int) -> None:
        """At the end of the data: step on the remaining microbatches, unless one rank has none."""
        sums = self.window.sums
        left = sums.count > 0 and not sums.open and self.window.closed.have_used(batches, before)
        if sums.length > 1 and not self.guard.ranks.any(not left):
            self.window.close_early()
            self.finish_window()

    def closure_step(self, closure: Callable[[], Tensor]) -> Outcome:
        """Run a step of an optimizer that evaluates the loss itself."""
        if self.window.sums.length > 1 or self.guard.policy.scaler is not None:
            raise UsageError("a closure evaluates the loss several times a step: use accumulate=1 and no loss scaling.")
        self._prepare()
        evaluate = partial(self.window.evaluate, closure)
        step = ClosureStep(self.guard.guarded, evaluate, lambda loss: self._facts(), raises=True)
        try:
            with self._others.own_step():
                self.optimizer.step(step)
        except ClosureRefused:
            pass
        except BaseException:
            step.raised()
            raise
        numbers = step.end()
        if numbers is None:
            raise UsageError("the optimizer did not call the closure it was given.")
        if self.capture is not None:
            self.capture.decided(numbers, numbers.record().skipped, self.results.buffers, evaluated=True)
        return self._close_step(numbers)

    def _facts(self) -> StepFacts:
        window, results = self.window, self.results
        limit = self.guard.history.budgets.rates.limit
        return StepFacts(
            results.steps, window.sums.mean_loss, window.divisor(), self.own_signals, results.lr_factor, lr_limit=limit
        )

    def _prepare(self) -> None:
        """Called right before the optimizer writes into the parameters."""
        if self.guard.guarded.look_for_new_parameters():
            self.persistence.weights.forget_snapshots()  # they do not contain the new parameters
        if self._keeps_steps:
            rates, onset = self.guard.guarded.rates(), self.guard.history.onset
            self.persistence.weights.notice_rates(self.results.steps, rates, onset)
            self.persistence.before_update()
            self.guard.decider.stop_wanted = self.persistence.data.interrupts.received is not None
        if self.capture is not None:
            self.capture.before_step()

    def _leave_out(self) -> None:
        """Count a step whose batches are drawn but not trained on. The schedule continues: it follows the data."""
        signals = Signals(self.results.steps, lr=self.guard.guarded.lr(self.results.lr_factor))
        self._close_step(StepNumbers(StepRecord(signals, skipped=True, notices=("left_out",))))

    def _close_step(self, numbers: StepNumbers) -> Outcome:
        step = self.results.steps
        outcome = Outcome(step, numbers.record)
        self._others.check_schedulers(step)
        if self.scheduler is not None:
            self.optimizer._opt_called = True  # prevents torch's warning about the order after a skipped first step
            self.scheduler.step()
        self._others.step_ended()
        self.guard.order.stop()
        self.own_signals = {}
        self.window.begin(step + 1)
        if self.capture is not None:
            self.capture.notes.begin(step + 1)
        self.results.take(numbers)
        if self._keeps_steps:
            self._persist()
        return outcome

    def _persist(self) -> None:
        """Save what is due, and stop if requested."""
        persistence, results = self.persistence, self.results
        persistence.after_step(results.steps, self.guard.history)
        stops = persistence.data.interrupts.received is not None or results.stop_at is not None
        if stops and not persistence.data.between_batches_soon:
            stop_if_asked(results, persistence, self.guard.ranks)
        persistence.data.step_over()

    def _without_gradient(self) -> StepNumbers:
        """No parameter had a gradient: the optimizer's step was called as in the bare loop, with one warning."""
        signals = Signals(self.results.steps, lr=self.guard.guarded.lr(self.results.lr_factor))
        self.guard.history.warn_once(signals, "optim.no-gradient", self._others.explain_missing_gradient())
        return StepNumbers(StepRecord(signals, skipped=False))

    # ---- the stabilizer's own state ---------------------------------------------------------------------------------

    def own_state(self, live: bool) -> LiveStabilizerState:
        """The stabilizer's own state, with steps whose numbers may not have arrived yet.

        With `live`, tensors are not copied.
        """
        guard = read_state(self.guard, self.results, live)
        return {
            "schema": guard["schema"],
            "policy": guard["policy"],
            "param_norm": guard["param_norm"],
            "window": self.window.state_dict(live),
            "results": guard["results"],
        }

    def load_own_state(self, state: StabilizerState) -> None:
        """Continue from a saved state; load the models first. A part whose settings have changed starts again."""
        present = in_present_format(state, "the state of the stabilizer")
        load_state(self.guard, self.results, present)
        self.window.load_state_dict(present["window"], self.results.steps)
        if self.capture is not None:
            self.capture.moved_to(self.results.steps, self.window.sums.count > 0)

    def _load_rules(self, state: StabilizerState) -> None:
        """Load only what belongs to the weights: the states of the rules, the clipper and the loss scale."""
        load_rules(self.guard, in_present_format(state))


def _log_saves(checkpoints: CheckpointManager | None, rows: LogRows) -> None:
    """Record what happens to the checkpoints; the rows before one are on disk when it is."""
    if checkpoints is not None:
        events = checkpoints.events
        events.before_saved, events.on_saved, events.on_failing = rows.log.flush, rows.saved, rows.failing
        rows.log.take(CheckpointsExpected(checkpoints.every_steps, checkpoints.every_minutes))


def _loop_hooks(run: StabilizedRun) -> LoopHooks:
    """The interface of a run while batches are drawn and checkpoints are loaded."""
    rows = run.guard.rows
    return LoopHooks(
        on_draw=run.capture.notes.drew if run.capture else None,
        on_stop_point=lambda: stop_if_asked(run.results, run.persistence, run.guard.ranks),
        on_failed_draw=lambda error: save_before(error, run.results, run.persistence, rows),
        on_begin=lambda: partial(run._close_last_window, run.window.closed.count),
        on_resume=rows.resumed if rows else None,
        leave_out=run._leave_out,
        on_back=rows.returned_to if rows else None,
        microbatches=lambda: run.window.sums.length,
    )


def _shown(value: Any) -> str:
    """A setting as text: large objects by their class, a folder by its path."""
    if isinstance(value, (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        return type(value).__name__
    if isinstance(value, (CheckpointManager, RunLog)):
        return f"{type(value).__name__}({str(value.folder)!r})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_shown(part)}' for key, part in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)


def _reports_failed_collectives(method: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorator of a stabilizer's method: a failed collective in it is logged as an event.

    If another rank is known to have ended, the error names it instead of "Connection closed by peer".
    """

    @wraps(method)
    def reporting(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            run: StabilizedRun = args[0]._run  # type: ignore[attr-defined]
            lost = run.guard.rows.failed(error, run.results.steps) if run.guard.rows is not None else ""
            if lost:
                raise RankFailed(f"this rank cannot continue: {lost}.") from error
            raise

    return reporting


class TrainingStabilizer:
    """Watches and protects a training loop: clip, skip, scale, accumulate, and report.

    >>> import torch, surefoot as sf
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    >>> stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(1.0))
    >>> loss = model(torch.randn(8, 4)).square().mean()
    >>> stabilizer.backward(loss)
    >>> stabilizer.step().applied
    True

    Args:
        model: the module the optimizer trains, or several.
        optimizer: any torch optimizer. Fused Adam, AdamW, SGD and Adagrad need no host sync.
        scheduler: stepped once per optimizer step, including skipped ones: the schedule follows the data.
        clip: a clipper, or shapers followed by a clipper.
        precision: the precision of `autocast()`; `"fp16"` adds a `DynamicLossScaler`. With `None`, `autocast()` does
            nothing.
        scaler: loss scaling for fp16: a `DynamicLossScaler` or a `torch.amp.GradScaler`.
        accumulate: microbatches per optimizer step.
        checker: the detectors and their thresholds.
        escalation: budgets for the response to refused steps; `None` skips indefinitely.
        recovery: returns to earlier states when skipping does not help; `None` never returns.
        checkpoints: where and how often to save the run, and where `resume` finds it.
        also_save: other objects of the run with `state_dict` and `load_state_dict`, by name: an average of the weights,
            the other stabilizer of a GAN. Plain values, such as a config, are saved too; they are not loaded, and
            differences from them in a resumed run are logged.
        incidents: a run folder, or a keeper with its own settings: every step that is refused or undone is kept there
            with all that `surefoot replay` needs to run it again.
        log: the run folder that every step and event is written to, for `surefoot report`, `watch` and `serve`;
            or a `RunLog`, which two stabilizers may share and which can have sinks.
        watch: what to measure beyond the gradients.
        decide_on: where a step is decided. `"host"` reads its numbers immediately; `"device"` reads none until
            `lag_steps` later. `"auto"`: host on a CPU, device elsewhere.
        lag_steps: the number of steps after which the host reads a step that was decided on the device.
        zero_grad: set gradients to `None` after each step, and before the first `backward()` of the next, because
            another model's backward may have left some (a GAN's generator does, in the discriminator).
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        *,
        scheduler: Any = None,
        clip: Clipper | Shaper | Sequence[Clipper | Shaper] | None = None,
        precision: Precision | None = None,
        scaler: LossScaler | torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        checker: StabilityChecker | None = None,
        escalation: Escalation | None = Escalation(),  # noqa: B008 (frozen)
        recovery: TrainingRecovery | None = None,
        checkpoints: CheckpointManager | None = None,
        also_save: Mapping[str, Any] | None = None,
        incidents: IncidentKeeper | str | Path | None = None,
        log: str | PathLike[str] | RunLog | None = None,
        watch: LayerMetrics | None = None,
        decide_on: Literal["auto", "host", "device"] = "auto",
        lag_steps: int = 4,
        zero_grad: bool = True,
    ) -> None:
        self._given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        models = models_of(model)
        kinds: dict[str, tuple[object, type]] = {
            "checker": (checker, StabilityChecker),
            "escalation": (escalation, Escalation),
            "recovery": (recovery, TrainingRecovery),
            "checkpoints": (checkpoints, CheckpointManager),
            "watch": (watch, LayerMetrics),
            "incidents": (keeper := keeper_for(incidents), IncidentKeeper),
        }
        kinds |= {"also_save": (also_save, Mapping), "zero_grad": (zero_grad, bool)}
        check_settings(models, optimizer, scheduler, precision, scaler, accumulate, lag_steps, decide_on, kinds)
        layout = layout_of(models, optimizer)
        if checkpoints is not None:
            checkpoints.claim()
        guard_settings = GuardSettings(
            clip=clip, precision=precision, scaler=scaler, checker=checker, escalation=escalation, recovery=recovery,
            watch=watch, decide_on=decide_on, lag_steps=lag_steps, log=log, scheduler=scheduler, incidents=keeper,
        )  # fmt: skip
        guard = build_guard(models, optimizer, layout, guard_settings)
        self.optimizer, self.scheduler, self._precision = optimizer, scheduler, precision
        self.log = guard.log
        """The run log, if there is one."""
        self._run = StabilizedRun(
            models, optimizer, scheduler, guard, accumulate=accumulate, zero_grad=zero_grad, recovery=recovery,
            checkpoints=checkpoints, also_save=also_save, keeper=keeper,
            settings={"precision": precision, "accumulate": accumulate},
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"TrainingStabilizer({', '.join(f'{name}={_shown(value)}' for name, value in self._given.items())})"

    # ---- the loop -------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        """Run the forward pass in the chosen precision."""
        dtype = _AUTOCAST.get(self._precision or "")
        return nullcontext() if dtype is None else torch.autocast(self._run.guard.layout.home.type, dtype=dtype)

    @_reports_failed_collectives
    def backward(self, loss: Tensor, *, weight: Scalar | None = None, **options: Any) -> None:
        """Run backward on one microbatch, scaled for precision and accumulation.

        Args:
            loss: a scalar, the mean over the microbatch.
            weight: the number of rows or tokens that it is the mean of, if microbatches differ in size.
            options: passed on to `torch.Tensor.backward`, such as `retain_graph=True`.
        """
        _backward_begins(self._run.guard.rows)
        self._run.window.backward(loss, weight, options)
        if self._run.capture is not None:
            self._run.capture.notes.ran_backward(loss, weight)

    @_reports_failed_collectives
    def run_microbatches(
        self, loss_fn: Callable[[Any], Tensor], batch: Any, *, weight: Callable[[Any], Scalar] | None = None
    ) -> Tensor:
        """Run one microbatch forward and backward; if memory is insufficient, in pieces, with the same gradient.

        Replaces the forward pass and `backward(loss)`; call `step()` afterwards as usual. Returns the loss of the whole
        batch, without its graph.

        Args:
            loss_fn: takes a batch, or fewer rows of it, and returns their mean loss. Use autocast inside.
            batch: a tensor, or tuples, lists or mappings of tensors; the first dimension is the batch.
            weight: counts what the loss of a piece is the mean of, such as its tokens; by default, rows. With
            `accumulate` it is the microbatch's weight too, as in `backward(loss, weight=...)`.
        """
        _require_callable("loss_fn", loss_fn)
        capture = self._run.capture
        if capture is not None:
            capture.notes.was_given(batch)
        _backward_begins(self._run.guard.rows)
        loss = self._run.window.run_pieces(loss_fn, batch, weight)
        if capture is not None:
            capture.notes.ran_backward(loss, None if weight is None else partial(weight, batch))
        return loss

    def observe(self, **signals: Scalar) -> None:
        """Record and monitor your own signals with this step: `stabilizer.observe(kl=kl, entropy=entropy)`."""
        for name, value in signals.items():
            if name in _OUR_SIGNALS:
                raise UsageError(f"signal {name!r} is already measured by surefoot: use another name.")
            self._run.own_signals[name] = signal_value(name, value)

    @_reports_failed_collectives
    def step(self, closure: Callable[[], Tensor] | None = None) -> Outcome:
        """Complete a microbatch; after the last one of a window, decide on the gradients and apply or skip them.

        Raises `TrainingHalted` when every attempt to continue is used up.
        """
        if closure is not None:
            _require_callable("closure", closure)
            return self._run.closure_step(closure)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS evaluates the loss itself: call `stabilizer.step(closure)`, as with the bare optimizer."
            )
        window = self._run.window.sums
        if not window.open and (self._run.guard.policy.scaler is not None or window.length > 1):
            raise UsageError(
                "`step()` was called without `backward()`. With loss scaling or accumulation, pass the loss to "
                "`stabilizer.backward(loss)`, not `loss.backward()`."
            )
        return self._run.finish_window() if self._run.close_microbatch() else Outcome(self.steps, None)

    def flush(self) -> Outcome | None:
        """Step on a window that ended early, at the end of an epoch; `None` if there is nothing to step on.

        This happens automatically at the end of the batches of `resume`.
        """
        return self._run.finish_window() if self._run.window.close_early() else None

    # ---- results --------------------------------------------------------------------------------------------------
    # Reading changes nothing: the response to a step comes `lag_steps` later, whether or not it was read. With several
    # processes, one rank may read alone.

    @property
    def steps(self) -> int:
        """The number of optimizer steps so far, including skipped ones."""
        return self._run.results.steps

    @property
    def incidents(self) -> list[Incident]:
        """Events that need attention, oldest first; the last 200. Waits for numbers that have not arrived."""
        return list(self._run.results.seen().incidents)

    @property
    def history(self) -> list[StepRecord]:
        """The last 1,000 steps, oldest first, the last 100 with their layers.

        Waits for numbers that have not arrived.
        """
        return list(self._run.results.seen().history)

    @property
    def counts(self) -> dict[str, int]:
        """Steps, applied, skipped, clipped, overflows, alarms. Waits for numbers that have not arrived."""
        return dict(self._run.results.seen().counts)

    def summary(self) -> str:
        """Text with the counts, the last incidents and the largest gradients of the last step; HTML in a notebook."""
        seen = self._run.results.seen()
        layers = seen.history[-1].signals.layers if seen.history else None
        rows = [] if layers is None else list(layers.rows())
        rows.sort(key=lambda row: (-row["nonfinite"], -row["grad_norm"]))
        return RunSummary(seen.counts, [str(incident) for incident in list(seen.incidents)[-5:]], rows[:10])

    # ---- resuming and saving --------------------------------------------------------------------------------------

    def resume(self, loader: Any, epochs: int = 1) -> FollowedBatches:
        """The remaining batches of `loader`: all of them, or those after the newest checkpoint.

        The first call loads that checkpoint, if there is one. Each call is a pass over the data (`epochs` of them);
        completed passes yield nothing. While batches are drawn, the signals named by the checkpoints (SIGTERM,
        SIGINT, SIGUSR1) finish the step, save, and exit with status 128 + signal; a second signal exits immediately.
        """
        return self._run.persistence.follow(loader, epochs)

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the remaining epochs, for a loop with other work around each pass.

        A stop signal during that work is received too; the run stops when the work is done.
        """
        return self._run.persistence.epochs(total)

    def restore(self, which: Literal["latest", "good", "best"] | int | Path = "latest") -> int | None:
        """Load a checkpoint now; returns its step, or `None` if there is none yet. Every process must call this."""
        return self._run.persistence.restore(which)

    def save(self, metric: float | None = None) -> None:
        """Save a checkpoint now, and return when it is on disk. Raises `CheckpointError` if it cannot be written.

        `metric` ranks the checkpoints: lower is better, such as a validation loss. While none is given, the mean
        training loss of the last steps is used.
        """
        self._run.results.drain(is_end=False)
        history, is_given = self._run.guard.history, metric is not None
        ranked_by = metric if is_given else history.recent_loss()
        self._run.persistence.saver.save(self.steps, history.instability(), ranked_by, given=is_given)

    def state_dict(self) -> dict[str, Any]:
        """The stabilizer's own state: tensors and plain values, no pickle needed.

        Save model, optimizer and scheduler separately, as usual. `checkpoints` saves all of it together.
        """
        return dict(settled_own(self._run.own_state(live=False)))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved stabilizer stopped; load the model first.

        A part whose settings have changed starts again.
        """
        self._run.load_own_state(cast("StabilizerState", state))


def run_of(stabilizer: TrainingStabilizer) -> StabilizedRun:
    """The parts of a stabilizer, for a replay or an experiment that reads a run from outside."""
    return stabilizer._run


def settled_own(state: LiveStabilizerState) -> StabilizerState:
    """The stabilizer's own state once the numbers of its last steps have arrived."""
    return {**state, "results": settled(state["results"])}


def _require_callable(name: str, function: object) -> None:
    if not callable(function):
        raise UsageError(f"`{name}` must be a function that returns the loss; got {shown(function)}.")


def _backward_begins(rows: LogRows | None) -> None:
    """Stop the clock of this rank's own time: in a backward, ranks wait for each other."""
    if rows is not None and rows.rank is not None:
        rows.rank.clock.backward_begins()
