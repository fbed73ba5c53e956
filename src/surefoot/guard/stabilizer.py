"""`TrainingStabilizer`: everything between `loss.backward()` and `optimizer.step()`, in the user's own loop.

The one stateful shell, and the one file that knows every stage:

    tensors ─observe─▶ Signals ─detect─▶ Verdict ─decide─▶ Decision ─act─▶ Outcome

Each step the gradients are measured in one pass, judged, clipped, and applied or left out. On a GPU with a fused
optimizer all of that stays on the device: the host reads the step's numbers `lag_steps` later. On a CPU, where reading
is free, the host decides at once. An optimizer that is not fused costs one scalar sync a step on a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from surefoot.act.closure import ClosureRefused
from surefoot.core.formats import STABILIZER_STATE
from surefoot.core.state_tree import pack
from surefoot.decide.agreement import Ranks, find_group
from surefoot.decide.recovery import Escalation, TrainingRecovery
from surefoot.detect.checker import StabilityChecker
from surefoot.detect.combine import Combined, tolerated
from surefoot.errors import SettingError, UsageError, require
from surefoot.guard.backward import GradientWindow
from surefoot.guard.guarded_optimizer import ClosureStep, GuardedOptimizer, StepFacts
from surefoot.guard.incident_capture import IncidentCapture, RunToCapture, keeper_for
from surefoot.guard.log_rows import LogRows, open_log
from surefoot.guard.model_sampling import ModelSampler
from surefoot.guard.persistence import Followed, OwnState, RunParts, RunPersistence
from surefoot.guard.run_actions import RunActions
from surefoot.guard.run_history import RunHistory
from surefoot.guard.step_decision import StepDecider
from surefoot.guard.step_numbers import StepNumbers
from surefoot.guard.step_results import StepResults, settled
from surefoot.guard.validation import as_scaler, check_settings, split_clip
from surefoot.keep.checkpoint.manager import CheckpointManager
from surefoot.keep.snapshots import TrainedState
from surefoot.observe.parameters import BackwardOrder, Layout
from surefoot.observe.tensors import LayerMetrics
from surefoot.record.incidents.retention import IncidentKeeper
from surefoot.types import Incident, Outcome, Scalar, Signals, StepRecord, format_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from os import PathLike
    from pathlib import Path

    from surefoot.guard.validation import Precision
    from surefoot.record.log import RunLog
    from surefoot.types import Clipper, LossScaler, Shaper

_OUR_SIGNALS = frozenset(each.name for each in fields(Signals))
_AUTOCAST: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingStabilizer:
    """Watches and protects a training loop: clip, skip, scale, accumulate, and say what happened.

    >>> import torch, surefoot as sf
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    >>> stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(1.0))
    >>> loss = model(torch.randn(8, 4)).square().mean()
    >>> stabilizer.backward(loss)
    >>> stabilizer.step().applied
    True
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
        """Set the stabilizer beside a loop.

        Args:
            model: the module the optimizer trains, or several.
            optimizer: any torch optimizer. Fused Adam, AdamW, SGD and Adagrad need no host sync.
            scheduler: stepped once per optimizer step, skipped ones included: the schedule follows the data.
            clip: a clipper, or shapers followed by a clipper.
            precision: what `autocast()` runs in; `"fp16"` brings a `DynamicLossScaler`. `None`: `autocast()` does
                nothing.
            scaler: loss scaling for fp16, ours or a `torch.amp.GradScaler` to drive.
            accumulate: microbatches per optimizer step.
            checker: the detectors and their thresholds.
            escalation: budgets for what is done about refused steps; `None` goes on skipping for ever.
            recovery: returns to earlier states when skipping does not help; `None` never returns.
            checkpoints: where and how often to save the run, and where `resume` finds it.
            also_save: whatever else belongs to the run and has `state_dict` and `load_state_dict`, by name: an average
                of the weights, the other stabilizer of a GAN.
            incidents: a run folder, or a keeper with settings of its own: every step that is refused or undone is
                kept there with all that `surefoot replay` needs to run it again.
            log: the run folder that every step and event is written to, for `surefoot report`, `watch` and `serve`;
                or a `RunLog`, which two stabilizers may share and which can have sinks.
            watch: what to measure beyond the gradients.
            decide_on: where a step is decided. `"host"` reads its numbers at once; `"device"` reads none until
                `lag_steps` later. `"auto"`: host on a CPU, device elsewhere.
            lag_steps: how many steps later the host looks at a step that was decided on the device.
            zero_grad: set gradients to `None` after each step, and before the first `backward()` of the next, since
                another model's backward may have left some (a GAN's generator does, in the discriminator).
        """
        models = [model] if isinstance(model, nn.Module) else list(model)
        kinds = {
            "checker": (checker, StabilityChecker),
            "escalation": (escalation, Escalation),
            "recovery": (recovery, TrainingRecovery),
            "checkpoints": (checkpoints, CheckpointManager),
            "watch": (watch, LayerMetrics),
            "incidents": (keeper_for(incidents), IncidentKeeper),
        }
        check_settings(models, optimizer, scheduler, precision, scaler, accumulate, lag_steps, decide_on, kinds)
        self.optimizer, self.scheduler = optimizer, scheduler
        self._layout = Layout(models, optimizer)
        require(
            self._layout.known > 0,
            f"the optimizer's {len(self._layout.parameters)} parameters are none of the model's: "
            "it would train nothing of it. Build the optimizer from `model.parameters()`.",
        )
        self._home = self._layout.home
        on_device = decide_on == "device" or (decide_on == "auto" and self._home.type != "cpu")
        lag_steps = lag_steps if on_device else 0
        self._precision, self._zero_grad = precision, zero_grad
        group = find_group(models)
        ranks = Ranks(group, self._home)
        if checkpoints is not None:
            checkpoints.claim()
        self.log = open_log(log, ranks)
        """The run log, if there is one."""
        rows = LogRows(self.log, ModelSampler(models)) if self.log is not None else None
        checker = checker or StabilityChecker()
        shapers, clipper = split_clip(clip)
        self._decider = StepDecider(
            tolerated(Combined(checker.step_rules, "any")) if checker.step_rules else None,
            tolerated(checker.setback) if recovery and checker.setback else None,
            clipper,
            as_scaler(scaler, precision, self._home),
            count=len(self._layout.parameters),
            home=self._home,
            decides_on_device=on_device,
            group=group,
        )
        self._guarded = GuardedOptimizer(
            optimizer, self._layout, self._decider, shapers, watch, on_device, sampler=rows.sampler if rows else None
        )
        self._order = BackwardOrder(self._layout.parameters)
        self._history = RunHistory(
            checker,
            escalation,
            recovery,
            self._decider.scaler.floor if self._decider.scaler else None,
            self._order.first,
            self._guarded.parameters_broken,
            ranks.any,
            rows.incident if rows else None,
        )
        self._window = GradientWindow(models, self._layout, self._decider, self._history, group, accumulate, zero_grad)
        settings = {"precision": precision, "accumulate": accumulate, "decide_on": "device" if on_device else "host"}
        self._capture = IncidentCapture(
            keeper_for(incidents),
            RunToCapture(
                models,
                optimizer,
                scheduler,
                self._layout,
                self._decider,
                self._history,
                ranks,
                settings | {"shapers": shapers},
            ),
            lag_steps,
            buffers_before=lambda step: self._results.buffers.before(step),
        )
        own = OwnState(lambda: self._own_state(live=True), settled_own, self.load_state_dict, self._load_rules)
        self._persistence = RunPersistence(
            RunParts(models, optimizer, scheduler, dict(also_save or {}), own),
            TrainedState(models, optimizer, self._decider.live_states, self._decider.put_back),
            checkpoints,
            recovery,
            lag_steps,
            ranks,
            on_draw=self._capture.drew,
            on_stop_point=lambda: self._actions.stop_if_asked(self._results),
            on_resume=rows.resumed if rows else None,
        )
        self._actions = RunActions(self._guarded, self._history, self._persistence, self._capture, ranks)
        self._results = StepResults(
            models, self._history, lag_steps, respond=self._actions.respond, on_step=rows.step if rows else None
        )
        self._own_signals: dict[str, Scalar] = {}
        if self.log is not None and rows is not None:
            self.log.before_close(self._results.report_rest)
            if checkpoints is not None:
                checkpoints.events.on_saved, checkpoints.events.on_failing = rows.saved, rows.failing

    # ---- the loop -------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        """Run the forward pass in the chosen precision."""
        dtype = _AUTOCAST.get(self._precision or "")
        return nullcontext() if dtype is None else torch.autocast(self._home.type, dtype=dtype)

    def backward(self, loss: Tensor, *, weight: Scalar | None = None, **options: Any) -> None:
        """Run backward on one microbatch, scaled for precision and accumulation.

        Args:
            loss: a scalar, the mean over the microbatch.
            weight: how many rows or tokens it is the mean over, when microbatches are uneven.
            options: passed on to `torch.Tensor.backward`, such as `retain_graph=True`.
        """
        self._window.backward(loss, weight, options)
        self._capture.ran_backward(loss, weight)

    def run_microbatches(
        self, loss_fn: Callable[[Any], Tensor], batch: Any, *, weight: Callable[[Any], Scalar] | None = None
    ) -> Tensor:
        """Run one microbatch forward and backward; where memory does not suffice, in pieces, with the same gradient.

        Takes the place of the forward and of `backward(loss)`; `step()` follows as ever. Returns the loss of the whole
        batch, without its graph.

        Args:
            loss_fn: given a batch, or fewer rows of it, returns the mean loss over them. Autocast goes inside.
            batch: a tensor, or tuples, lists or mappings of tensors; the first dimension is the batch.
            weight: counts what the loss of a piece is a mean over, such as its tokens; rows if left out. With
                `accumulate` it is the microbatch's weight too, as in `backward(loss, weight=...)`.
        """
        self._capture.was_given(batch)
        loss = self._window.run_pieces(loss_fn, batch, weight)
        self._capture.ran_backward(loss, None if weight is None else partial(weight, batch))
        return loss

    def observe(self, **signals: Scalar) -> None:
        """Watch signals of your own with this step: `stabilizer.observe(kl=kl, entropy=entropy)`."""
        for name, value in signals.items():
            if name in _OUR_SIGNALS:
                raise UsageError(f"signal {name!r} is measured by surefoot itself: give yours another name.")
            if isinstance(value, Tensor) and value.numel() != 1:
                raise UsageError(f"signal {name!r} must be one number; got a tensor of shape {tuple(value.shape)}.")
            self._own_signals[name] = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)

    def step(self, closure: Callable[[], Tensor] | None = None) -> Outcome:
        """Close a microbatch; with the last one of a window, judge the gradients and apply them or not.

        Raises `TrainingHalted` when every attempt to go on is used up.
        """
        if closure is not None:
            return self._closure_step(closure)
        if closure is None and isinstance(self.optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS evaluates the loss itself: call `stabilizer.step(closure)`, as with the bare optimizer."
            )
        window = self._window.sums
        if not window.open and (self._decider.scaler is not None or window.length > 1):
            raise UsageError(
                "`step()` came without a `backward()` since the last one. With loss scaling or accumulation the loss "
                "must go through `stabilizer.backward(loss)`, not `loss.backward()`."
            )
        self._capture.close_microbatch()
        if not self._window.close_microbatch():
            return Outcome(self.steps, None)
        return self._finish_window()

    def flush(self) -> Outcome | None:
        """Step on a window that ended early, at the end of an epoch; `None` if there is nothing to step on."""
        return self._finish_window() if self._window.close_early() else None

    # ---- what happened --------------------------------------------------------------------------------------------
    # Looking changes nothing: what a step calls for is done `lag_steps` later, at the same step whether or not anybody
    # looks. With several processes a rank may look alone.

    @property
    def steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._results.steps

    @property
    def incidents(self) -> list[Incident]:
        """What a person should know about, oldest first; the last 200. Waits for numbers still on their way."""
        return list(self._results.seen().incidents)

    @property
    def history(self) -> list[StepRecord]:
        """The last 1,000 steps, oldest first, the last 100 with their layers. Waits for numbers still on their way."""
        return list(self._results.seen().history)

    @property
    def counts(self) -> dict[str, int]:
        """Steps, applied, skipped, clipped, overflows, alarms. Waits for numbers still on their way."""
        return dict(self._results.seen().counts)

    def summary(self) -> str:
        """A few lines a person can read: counts, the last incidents, the largest gradients of the last step."""
        seen = self._results.seen()
        lines = [", ".join(f"{count:,} {name}" for name, count in seen.counts.items())]
        lines += [str(incident) for incident in list(seen.incidents)[-5:]]
        layers = seen.history[-1].signals.layers if seen.history else None
        if layers is not None:
            rows = sorted(layers.rows(), key=lambda row: (-row["nonfinite"], -row["grad_norm"]))
            lines += ["", format_table(rows[:10])]
        return "\n".join(lines)

    # ---- coming back ----------------------------------------------------------------------------------------------

    def resume(self, loader: Any, epochs: int = 1) -> Followed:
        """The batches of `loader` that are left: all of them, or those after the newest checkpoint.

        The first call loads that checkpoint, if there is one. Each call is a pass over the data (`epochs` of them);
        passes that were complete give nothing. While batches are drawn, the signals named by the checkpoints (SIGTERM,
        SIGINT, SIGUSR1) finish the step, save, and exit with status 128 + signal; a second one exits at once.
        """
        return self._persistence.follow(loader, epochs)

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs that are left, for a loop with work of its own around each pass.

        A signal during that work is heard as well; the run stops when the work is done.
        """
        return self._persistence.epochs(total)

    def restore(self, which: Literal["latest", "good", "best"] | int | Path = "latest") -> int | None:
        """Load a checkpoint now; returns its step, or `None` if there is none yet. With several processes, on each."""
        return self._persistence.restore(which)

    def save(self, metric: float | None = None) -> None:
        """Save a checkpoint now, and return when it is on disk. Raises `CheckpointError` if it cannot be written.

        `metric` is what makes one better than another, lower being better, such as a validation loss. As long as none
        is given, the mean training loss of the last steps is compared.
        """
        self._results.drain()
        self._persistence.save(self.steps, self._history.unrest(), metric, given=metric is not None)

    def state_dict(self) -> dict[str, Any]:
        """Everything of the stabilizer's own: tensors and plain values, no pickle needed.

        Model, optimizer and scheduler are the user's and saved as ever. `checkpoints` saves all of it together.
        """
        return settled_own(self._own_state(live=False))

    def _own_state(self, live: bool) -> dict[str, Any]:
        return {
            "schema": STABILIZER_STATE.version,
            "judge": self._decider.state_dict(live),
            "param_norm": pack(self._guarded.param_norm, live),
            "window": self._window.state_dict(live),
            "aftermath": self._results.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved stabilizer stopped; load the model first. A part with other settings starts anew."""
        state = STABILIZER_STATE.read(state, "the state of the stabilizer", SettingError)
        self._load_rules(state)
        norm = state["param_norm"]
        self._guarded.param_norm = None if norm is None else norm.to(self._home)
        self._results.load_state_dict(state["aftermath"])
        self._window.load_state_dict(state["window"], self.steps)
        self._capture.moved_to(self.steps, self._window.sums.count > 0)

    def _load_rules(self, state: dict[str, Any]) -> None:
        """Only what belongs to the weights: what the rules, the clipper and the loss scale have learned."""
        self._decider.load_state_dict(state["judge"])
        self._guarded.forget_recordings()

    # ---- one optimizer step ---------------------------------------------------------------------------------------

    def _facts(self) -> StepFacts:
        window = self._window
        return StepFacts(
            self.steps, window.sums.mean_loss, window.divisor(), self._own_signals, self._results.lr_factor
        )

    def _prepare(self) -> None:
        """Just before the optimizer writes into the parameters."""
        if self._guarded.look_for_new_parameters():
            self._persistence.forget_snapshots()  # they know nothing of the new ones
        self._persistence.before_update()
        self._decider.stop_wanted = self._persistence.interrupts.received is not None
        self._capture.before_step()

    def _finish_window(self) -> Outcome:
        self._prepare()
        self._window.warn_if_clipped_outside()
        step = self._guarded.begin(self._facts())
        with step.undo:
            if not step.refused:
                self.optimizer.step()
        numbers = self._guarded.end(step) or self._empty_step()
        self._capture.judged(numbers, step.refused_unchanged)
        if self._zero_grad:
            self._layout.drop_gradients()
        return self._close_step(numbers)

    def _closure_step(self, closure: Callable[[], Tensor]) -> Outcome:
        if self._window.sums.length > 1 or self._decider.scaler is not None:
            raise UsageError("a closure evaluates the loss several times a step: use accumulate=1 and no loss scaling.")
        self._prepare()
        evaluate = partial(self._window.evaluate, closure)
        step = ClosureStep(self._guarded, evaluate, lambda loss: self._facts(), raises=True)
        try:
            self.optimizer.step(step)
        except ClosureRefused:
            pass
        except BaseException:
            step.cancel()
            raise
        numbers = step.end()
        if numbers is None:
            raise UsageError("the optimizer did not call the closure it was given.")
        self._capture.judged(numbers, numbers.record().skipped, evaluated=1)
        return self._close_step(numbers)

    def _close_step(self, numbers: StepNumbers) -> Outcome:
        outcome = Outcome(self.steps, numbers.record)
        if self.scheduler is not None:
            self.optimizer._opt_called = True  # a skipped first step is no reason for torch's order warning
            self.scheduler.step()
        self._order.stop()
        self._own_signals = {}
        self._window.begin(self.steps + 1)
        self._capture.begin(self.steps + 1)
        self._results.take(numbers)
        self._persist()
        return outcome

    def _persist(self) -> None:
        persistence, history = self._persistence, self._history
        persistence.after_step(self.steps, history.healthy, history.unrest, history.recent_loss)
        if not persistence.between_batches_soon:
            self._actions.stop_if_asked(self._results)
        persistence.step_over()

    def _empty_step(self) -> StepNumbers:
        """No parameter had a gradient: the bare loop's step was taken, and it is said once."""
        signals = Signals(self.steps, lr=self._guarded.lr(self._results.lr_factor))
        self._history.warn_once(signals, "optim.no-gradient", "no parameter of the optimizer has a gradient")
        return StepNumbers(StepRecord(signals, skipped=False))


def settled_own(state: dict[str, Any]) -> dict[str, Any]:
    """The stabilizer's own state once the numbers of its last steps have arrived."""
    return state | {"aftermath": settled(state["aftermath"])}
