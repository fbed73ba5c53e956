"""Incidents of a guarded run: when one is captured, from which state, and what is recorded about it.

`TrainingStabilizer` uses it, and so does `attach`, through `guard/loop_capture.py`. Models, optimizer and scheduler are
not kept alive. The content of an incident's folder is defined in `guard/captured_step.py`.

A step that the host refuses immediately (on a CPU, or on a GPU with an optimizer that is not fused) leaves everything
unchanged except the schedule and the loss scale, which are recorded before they advance: that is the exact state before
the step. On a GPU this state is copied to the host immediately, because the result of the step is read some steps
later. If the refusal is known only then, or if recovery undoes steps that were applied, the current state is captured.
The incident records how many steps have been applied to it since; its replay is exact only if there were none.

Only the first of several consecutive refused steps is captured.

`StepNotes` records every step, for any kind of loop (`surefoot run` uses it too). Healthy steps only cost the recording
(`record/incidents/step_capture.py`). An error while recording or writing ends the recording with one report, not the
run. After a disk error, the recording continues: later incidents are tried again, after pauses that double.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from surefoot.core.state_tree import pack
from surefoot.core.weak_reference import weak_callback, weak_reference, weak_references
from surefoot.decide.agreement import rank_and_world_size
from surefoot.guard.captured_step import SIGNALS_KEPT, CapturedStep
from surefoot.keep.staging import map_tensors
from surefoot.record.incidents.bundle import IncidentKeeper
from surefoot.record.incidents.contents import faults_of, model_parts, prints_of
from surefoot.record.incidents.environment import replay_command
from surefoot.record.incidents.step_capture import StepCapture, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from surefoot.guard.context import GuardContext
    from surefoot.guard.log_rows import LogRows
    from surefoot.guard.step_decision import StepNumbers
    from surefoot.keep.buffers import BufferKeeper
    from surefoot.record.incidents.step_capture import Weight
    from surefoot.types import Decision, StepRecord

    Method = TypeVar("Method", bound=Callable[..., Any])

log = logging.getLogger("surefoot")

ONLY_THE_LOSS = "the optimizer evaluates the loss itself, so only the loss can be compared"


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


class RunToCapture:
    """The parts of a run that an incident consists of. Models, optimizer and scheduler are not kept alive."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: Any,
        scheduler: Any,
        guard: GuardContext,
        settings: dict[str, Any],
        *,
        is_bare: bool = False,
    ) -> None:
        """Collect the parts.

        Args:
            models: the models that the optimizer trains.
            optimizer: the optimizer whose steps are guarded.
            scheduler: the learning-rate schedule, `None` if it is not known.
            guard: the guard of the optimizer.
            settings: the settings of the loop, which are recorded.
            is_bare: whether the loop is the script's own, so that a replay has to find models and backward calls.
        """
        self._models = weak_references(models)
        self._optimizer, self._scheduler = weak_reference(optimizer), weak_reference(scheduler)
        self.layout, self.policy, self.history, self.ranks = guard.layout, guard.policy, guard.history, guard.ranks
        self.settings, self.is_bare = settings, is_bare
        self.guard_settings = {
            "decide_on": "device" if guard.decides_on_device else "host",
            "shapers": guard.shapers,
        }

    @property
    def models(self) -> list[nn.Module]:
        """The models that are still alive."""
        return self._models()

    @property
    def optimizer(self) -> Any:
        """The optimizer, while it is alive."""
        return self._optimizer()

    @property
    def scheduler(self) -> Any:
        """The schedule, if there is one and it is alive."""
        return self._scheduler()


@dataclass(frozen=True)
class _PendingStep:
    """The data of a refused step that is about to change or be deleted."""

    step: int
    groups: list[dict[str, Any]]
    scheduler: Any
    scaler: Any
    gradients: dict[str, Tensor] | None
    faults: list[str]
    copies: dict[str, Any] | None
    """Weights and moments, if steps will be applied before the incident is written."""


class RunIncidentWriter:
    """Writes the folder of an incident."""

    def __init__(self, keeper: IncidentKeeper, run: RunToCapture) -> None:
        self._keeper, self._run = keeper, run

    def has_room(self, step: int) -> bool:
        """Whether the keeper accepts an incident of this step."""
        return self._keeper.has_room(step, *rank_and_world_size())

    def write(
        self,
        record: StepRecord,
        what: dict[str, Any],
        applied: int,
        held: _PendingStep | None,
        window: Window | None,
    ) -> Path:
        """Write the incident of a step; returns its folder.

        `applied` is the number of steps applied since, `held` the data kept of the step before that, `window` the
        inputs of the models.
        """
        run, gradients = self._run, held.gradients if held else None
        with torch.no_grad():
            prints = prints_of(window, _number(record.signals.loss), gradients, _norms(record))
            state = self._state(held)
        rank, world_size = rank_and_world_size()
        captured = CapturedStep(
            step=record.signals.step,
            event=what,
            rank=rank,
            world_size=world_size,
            inexact=[*faults_of(window), *(held.faults if held else []), *self._faults(applied, held, window)],
            applied_since=applied,
            signals=self._signals(),
            configuration=self._configuration(record, held, window),
            home=run.layout.home,
            state=state,
            window=window,
            gradients=gradients,
            prints=prints,
        )
        place = self._keeper.place(captured.step, rank, world_size)
        captured.write(place, self._keeper)
        return place

    def _faults(self, applied: int, held: _PendingStep | None, window: Window | None) -> list[str]:
        found = []
        if applied:
            found.append(
                f"the weights are from after the step: {applied} more {'step was' if applied == 1 else 'steps were'} "
                "applied before the host detected it"
            )
        if held is None:
            found.append(
                "the gradients were no longer available when it was detected: only their norms can be compared"
            )
        if self._run.ranks.several:
            found.append(
                f"gradients were averaged over {self._run.ranks.count} processes, of which this is one: only the loss "
                "of this one can be compared"
            )
        if self._run.is_bare and window is not None and not any(each.losses for each in window.microbatches):
            found.append("no backward pass was seen, so the batch of the step is not known")
        return found

    def _state(self, held: _PendingStep | None) -> dict[str, Any]:
        """Everything before the step except its batches, random streams and gradients."""
        run = self._run
        parts = held.copies if held else None
        parts = parts or {**model_parts(run.models), "optimizer": run.optimizer.state_dict()}
        scheduler = None if run.scheduler is None else run.scheduler.state_dict()
        if held is not None:
            parts = parts | {"optimizer": {**parts["optimizer"], "param_groups": held.groups}}
            scheduler = held.scheduler
        return {
            **parts,
            "scheduler": scheduler,
            "scaler": None if run.policy.scaler is None else {"state": held.scaler if held else None},
        }

    def _signals(self) -> list[dict[str, Any]]:
        rows = list(self._run.history.history)[-SIGNALS_KEPT:]
        return [
            {
                "step": row.signals.step,
                "loss": row.signals.loss,
                "grad_norm": row.signals.grad_norm,
                "lr": row.signals.lr,
                "scale": row.signals.loss_scale,
                "skipped": row.skipped,
            }
            for row in rows
        ]

    def _configuration(self, record: StepRecord, held: _PendingStep | None, window: Window | None) -> dict[str, Any]:
        run = self._run
        scale = _number(record.signals.loss_scale) if run.policy.scaler is not None else None
        if run.is_bare:
            scale = grad_scale_of(run.optimizer)
        ended = "backward" if window is not None and window.in_closure else "step"
        groups = held.groups if held else run.optimizer.state_dict()["param_groups"]
        names = ("params", "param_names")
        groups = [{key: value for key, value in group.items() if key not in names} for group in groups]
        return {
            **({"loop": "bare", "ended": ended} if run.is_bare else {}),
            **run.settings,
            **run.guard_settings,
            "models": [type(model).__name__ for model in run.models],
            "optimizer": type(run.optimizer).__name__,
            "groups": groups,
            "scheduler": None if run.scheduler is None else type(run.scheduler).__name__,
            "loss_scale": scale,
            "lr": record.signals.lr,
            **run.policy.settings(),
            **run.history.settings(),
        }


class RefusedSteps:
    """Selects the steps to keep: the first of several consecutive refused ones."""

    def __init__(self, refuses: Callable[[StepRecord], bool]) -> None:
        """`refuses` returns whether the step of a record was refused for a reason that is captured."""
        self._refuses = refuses
        self._last = -2
        """The last refused step."""

    def wants(self, record: StepRecord, again: bool) -> bool:
        """Whether to keep a step. With `again`, also one that follows a refused step that could not be written."""
        follows = record.signals.step - self._last == 1 and not again
        return self._refuses(record) and not follows

    def add(self, record: StepRecord) -> None:
        """The host has read a step."""
        if self._refuses(record):
            self._last = record.signals.step

    def restart(self) -> None:
        """The run has moved to another step: start again."""
        self._last = -2


class IncidentCapture:
    """Captures the refused steps of a run, and keeps the necessary data until the host has read them."""

    def __init__(self, keeper: IncidentKeeper, run: RunToCapture, lag_steps: int, rows: LogRows | None = None) -> None:
        """Capture incidents of a run for `keeper`. The host reads a refused step `lag_steps` later.

        `rows` writes the log of the run, in which the events of kept steps name their folders.
        """
        self._rows = rows
        self._writer, self._run, self._lag = RunIncidentWriter(keeper, run), run, lag_steps
        self._scaler_before: Any = None
        self._held: _PendingStep | None = None
        self._rule = RefusedSteps(run.history.budgets.refuses)
        self.notes = StepNotes(run.models, run.layout.home, lag_steps, on_failure=weak_callback(self._failed))

    def _failed(self, error: Exception) -> None:
        self._held = None
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        warn(f"surefoot: incidents are no longer captured ({why}); training continues.", error)

    # ---- during the run -------------------------------------------------------------------------------------------

    @while_noting
    def before_step(self) -> None:
        """The gradients are about to be decided on. The states of surefoot's scaler are replaced, never written to."""
        self._scaler_before = self._run.policy.scale_state

    @while_noting
    def decided(
        self,
        numbers: StepNumbers,
        refused_at_once: bool,
        buffers: BufferKeeper,
        *,
        evaluated: bool = False,
        faults: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """A step was decided: if it is known to be refused, keep the data that is about to change.

        Args:
            numbers: the step.
            refused_at_once: whether the host has refused it already, and the gradients are unchanged since backward.
            buffers: has the buffers from before the step.
            evaluated: whether the optimizer evaluates the loss itself.
            faults: further reasons why a replay cannot be exact.
        """
        if not refused_at_once:
            return
        record = numbers.record()
        if self._held is not None or not self._wanted(record):
            return
        run = self._run
        named, gradients = run.layout.with_gradient()
        by_name = {name: gradient for (name, _), gradient in zip(named, gradients, strict=True)}
        self._held = _PendingStep(
            record.signals.step,
            [
                {key: _settled(value) for key, value in group.items()}
                for group in run.optimizer.state_dict()["param_groups"]
            ],
            None if run.scheduler is None else copy.deepcopy(run.scheduler.state_dict()),
            pack(self._scaler_before),
            None if evaluated else by_name,
            [*([ONLY_THE_LOSS] if evaluated else []), *faults()],
            self._copies(buffers.before(record.signals.step)) if self._lag else None,
        )

    def _copies(self, before: dict[int, Tensor]) -> dict[str, Any]:
        """Everything that later steps change, on the host. Buffers that the forward wrote have their earlier values."""
        run = self._run

        def copied(tensor: Tensor) -> Tensor:
            return before.get(tensor.data_ptr(), tensor).detach().to("cpu", copy=True)

        return map_tensors({**model_parts(run.models), "optimizer": run.optimizer.state_dict()}, copied)  # type: ignore[no-any-return]

    @while_noting
    def moved_to(self, step: int, under_way: bool) -> None:
        """A saved run was loaded. It may have stopped in the middle of a step."""
        self.notes.moved_to(step, under_way)
        self._rule.restart()
        self._held = None

    def close(self) -> None:
        """Stop capturing."""
        self.notes.close()
        self._held = None

    # ---- capturing ------------------------------------------------------------------------------------------------

    def refused(self, record: StepRecord, later: Sequence[StepNumbers]) -> None:
        """The host has read a refused step, and has not responded to it yet.

        `later` contains the steps since, whose numbers may not have arrived yet.
        """
        try:
            self._keep_refused(record, later)
        finally:
            if self._rows is not None:
                self._rows.release()

    @while_noting
    def _keep_refused(self, record: StepRecord, later: Sequence[StepNumbers]) -> None:
        held = self._held
        if held is not None and held.step <= record.signals.step:
            self._held = None
        wanted = self._wanted(record)
        self._rule.add(record)
        if not wanted:
            return
        incident = self._run.history.incidents[-1]
        what = {
            "kind": incident.kind,
            "severity": incident.severity,
            "summary": incident.summary,
            "action": incident.action,
            "evidence": dict(incident.evidence),
        }
        held = held if held and held.step == record.signals.step else None
        applied = 0 if held else sum(not numbers.record().skipped for numbers in later)
        self._write(record, what, applied, held)

    @while_noting
    def returning(self, record: StepRecord, decision: Decision, steps: int) -> None:
        """Recovery is about to undo steps that were applied."""
        if record.skipped or not self._has_room(record.signals.step):
            return
        what = {
            "kind": "recovery",
            "severity": "warning",
            "summary": decision.reason,
            "action": decision.action,
            "evidence": {"loss": record.signals.loss, "grad_norm": record.signals.grad_norm},
        }
        self._write(record, what, steps - record.signals.step, None)

    def _wanted(self, record: StepRecord) -> bool:
        """Whether to keep the step, and there is room for it."""
        could_not_write = bool(self.notes.pauses.failures)
        return self._rule.wants(record, again=could_not_write) and self._has_room(record.signals.step)

    def _has_room(self, step: int) -> bool:
        return self.notes.pauses.may_try(step) and self._writer.has_room(step)

    def _write(self, record: StepRecord, what: dict[str, Any], applied: int, held: _PendingStep | None) -> None:
        place = self._writer.write(record, what, applied, held, self.notes.window(record.signals.step))
        self.notes.pauses.written()
        if self._rows is not None:
            self._rows.kept(record.signals.step, place)
        log.warning("surefoot: the step is kept in %s; to run it again: `%s`", place, replay_command(place))


def grad_scale_of(optimizer: Any) -> float | None:
    """The loss scale of the `GradScaler` that is calling the optimizer; `None` if there is none."""
    for found in gc.get_objects():
        is_scaler = issubclass(type(found), torch.amp.GradScaler) and found.is_enabled()
        if is_scaler and id(optimizer) in found._per_optimizer_states:
            return float(found.get_scale())
    return None


def _settled(value: Any) -> Any:
    """A copy of an optimizer's setting: a learning rate may be a tensor that is changed in place."""
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _norms(record: StepRecord) -> dict[str, dict[str, Any]]:
    """Norm and non-finite count of each gradient, from the step's record."""
    layers = record.signals.layers
    rows = [] if layers is None else list(layers.rows())
    return {row["name"]: {"norm": row["grad_norm"], "nonfinite": int(row["nonfinite"])} for row in rows}


def keeper_for(incidents: Any) -> Any:
    """A keeper for a folder, a keeper or `None`. Anything else is returned unchanged."""
    return IncidentKeeper(incidents) if isinstance(incidents, (str, Path)) else incidents
