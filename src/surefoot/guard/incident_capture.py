"""Incidents of a run with a stabilizer: when one is captured, from which state, and what is recorded about it.

A step that the host refuses at once (on a CPU; on a GPU with an optimizer that is not fused) leaves everything
unchanged except the schedule and the loss scale, which are noted before they move on: that is the exact state before
the step. On a GPU this state is copied to the host immediately, because the result of the step is read some steps
later. If the refusal is known only then, or if recovery undoes steps that were applied, the present state is captured.
The incident records how many steps have been applied to it since; its replay is exact only if there were none.

Healthy steps only pay for the notes (`record/incidents/step_capture.py`). Only the first of several consecutive refused
steps is captured. An error in here ends the capturing with a warning, not the run. A disk that fails does not even end
the capturing: later incidents are tried again.
"""

from __future__ import annotations

import copy
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from surefoot.core.redaction import Redactor
from surefoot.core.state_tree import pack
from surefoot.keep.staging import map_tensors
from surefoot.record.incidents.bundle import write_incident
from surefoot.record.incidents.contents import faults_of, model_parts, prints_of, window_part
from surefoot.record.incidents.environment import hardware, replay_command, script, switches, versions
from surefoot.record.incidents.retention import IncidentKeeper
from surefoot.record.incidents.step_capture import StepCapture, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from surefoot.decide.agreement import Ranks
    from surefoot.guard.run_history import RunHistory
    from surefoot.guard.step_decision import StepNumbers, StepPolicy
    from surefoot.observe.parameters import Layout
    from surefoot.record.incidents.step_capture import Weight
    from surefoot.types import Decision, StepRecord

    Method = TypeVar("Method", bound=Callable[..., Any])

log = logging.getLogger("surefoot")

SIGNALS_KEPT = 50
LONGEST_PAUSE = 1024
"""The longest pause, in steps, before a failing disk is tried again."""


def _quietly(method: Method) -> Method:
    """Watching never ends a run: an error in here ends the capturing, with one warning."""

    @functools.wraps(method)
    def guarded(self: IncidentCapture, *args: Any, **kwargs: Any) -> Any:
        if self.notes is None:
            return None
        try:
            return method(self, *args, **kwargs)
        except OSError as error:
            self.pauses.failed(error)
        except Exception as error:
            self._give_up(error)
        return None

    return cast("Method", guarded)


@dataclass(frozen=True)
class RunToCapture:
    """The parts of a run that an incident is made of."""

    models: Sequence[nn.Module]
    optimizer: Any
    scheduler: Any
    layout: Layout
    policy: StepPolicy
    history: RunHistory
    ranks: Ranks
    settings: dict[str, Any]
    """What the stabilizer was given, for the record."""


@dataclass(frozen=True)
class _PendingStep:
    """What is about to change or vanish, of a step that has just been refused."""

    step: int
    groups: list[dict[str, Any]]
    scheduler: Any
    scaler: Any
    gradients: dict[str, Tensor] | None
    faults: list[str]
    copies: dict[str, Any] | None
    """Weights and moments, where steps will be applied before the incident is written."""


class RunIncidentWriter:
    """Writes the folder of an incident."""

    def __init__(self, keeper: IncidentKeeper, run: RunToCapture) -> None:
        self._keeper, self._run = keeper, run

    def has_room(self, step: int) -> bool:
        """Whether the keeper wants an incident of this step."""
        return self._keeper.has_room(step, *self._place)

    @property
    def _place(self) -> tuple[int, int]:
        """This process among all that were started together, whether they train together or not."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def write(
        self,
        record: StepRecord,
        what: dict[str, Any],
        applied: int,
        held: _PendingStep | None,
        window: Window | None,
    ) -> Path:
        """Write the incident of a step; returns its folder.

        `applied` is how many steps have been applied since, `held` what was kept of the step before that, `window` what
        the models were called with.
        """
        step, redact = record.signals.step, Redactor(self._keeper.redact)
        left_out: list[str] = []
        inexact = [*faults_of(window), *(held.faults if held else []), *self._faults(applied, held)]
        with torch.no_grad():
            facts = {
                "step": step,
                "part": self._keeper.part,
                **what,
                "exact": not inexact,
                "inexact": inexact,
                "applied_since": applied,
                "rank": self._place[0],
                "world_size": self._place[1],
                "signals": self._signals(),
                "configuration": self._configuration(record, held),
                "versions": versions(),
                "hardware": hardware(self._run.layout.home),
                "switches": switches(),
                "script": script(redact),
                "fingerprints": prints_of(
                    window, _number(record.signals.loss), held.gradients if held else None, _norms(record)
                ),
            }
            tree = self._tree(window, held, redact, left_out)
            place = self._keeper.place(step, *self._place)
            write_incident(place, facts | {"left_out": left_out}, tree, self._keeper, redact)
        return place

    def _faults(self, applied: int, held: _PendingStep | None) -> list[str]:
        found = []
        if applied:
            found.append(
                f"the weights are as they were after the step: {applied} more {'was' if applied == 1 else 'were'} "
                "applied before the host learned of it"
            )
        if held is None:
            found.append("the gradients were gone by the time it was known: their norms are all there is to compare")
        if self._run.ranks.several:
            found.append(
                f"gradients were averaged over {self._run.ranks.count} processes, of which this is one: only the loss "
                "of this one can be compared"
            )
        return found

    def _tree(
        self, window: Window | None, held: _PendingStep | None, redact: Redactor, left_out: list[str]
    ) -> dict[str, Any]:
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
            "window": None if window is None else window_part(window, redact, left_out),
            "gradients": None if held is None else held.gradients,
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

    def _configuration(self, record: StepRecord, held: _PendingStep | None) -> dict[str, Any]:
        run = self._run
        groups = held.groups if held else run.optimizer.state_dict()["param_groups"]
        names = ("params", "param_names")
        groups = [{key: value for key, value in group.items() if key not in names} for group in groups]
        return {
            **run.settings,
            "models": [type(model).__name__ for model in run.models],
            "optimizer": type(run.optimizer).__name__,
            "groups": groups,
            "scheduler": None if run.scheduler is None else type(run.scheduler).__name__,
            "loss_scale": _number(record.signals.loss_scale) if run.policy.scaler is not None else None,
            "lr": record.signals.lr,
            **run.policy.settings(),
            **run.history.settings(),
        }


class DiskPauses:
    """Leaves a disk that fails alone for a while: for a step at first, twice as long each time."""

    def __init__(self) -> None:
        self.failures = 0
        """How often in a row the disk has failed."""
        self._asked_at, self._try_from = 0, 0

    def may_try(self, step: int) -> bool:
        """Whether an incident of this step may be written."""
        if step < self._try_from:
            return False
        self._asked_at = step
        return True

    def failed(self, error: OSError) -> None:
        """The disk has failed; the first of several failures in a row is logged."""
        self.failures += 1
        self._try_from = self._asked_at + min(2 ** (self.failures - 1), LONGEST_PAUSE)
        if self.failures == 1:
            log.warning(
                "surefoot: the incident of step %d cannot be written (%s: %s); training goes on, and later incidents "
                "are tried again.",
                self._asked_at,
                type(error).__name__,
                error,
            )

    def over(self) -> None:
        """The disk works, or the run has moved to another step."""
        self._try_from = 0

    def written(self) -> None:
        """An incident was written."""
        self.failures, self._try_from = 0, 0


class IncidentCapture:
    """Decides when an incident is written, and keeps what it needs until then."""

    def __init__(
        self,
        keeper: IncidentKeeper,
        run: RunToCapture,
        lag_steps: int,
        buffers_before: Callable[[int], dict[int, Tensor]],
    ) -> None:
        """Capture incidents for `keeper`; `buffers_before` gives the buffers as they were before a step."""
        self._writer, self._run, self._lag, self._buffers_before = (
            RunIncidentWriter(keeper, run),
            run,
            lag_steps,
            buffers_before,
        )
        self.notes: StepCapture | None = None
        self._scaler_before: Any = None
        self._held: _PendingStep | None = None
        self._last_refused = -2
        self.pauses = DiskPauses()
        try:
            self.notes = StepCapture(self._run.models, self._run.layout.home, self._lag)
            self.notes.failed = self._give_up
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        notes, self.notes, self._held = self.notes, None, None
        if notes is not None:
            notes.close()
        log.warning(
            "surefoot: incidents are no longer captured (%s: %s); training goes on.",
            type(error).__name__,
            " ".join(str(error).split())[:300],
            exc_info=None if isinstance(error, OSError) else error,
        )

    def note_everything(self) -> None:
        """Hold on to what the models are called with, whatever it costs: for a replay, which is one step long."""
        if self.notes is not None:
            self.notes.hold_all = True

    # ---- while the run goes on ------------------------------------------------------------------------------------

    @_quietly
    def drew(self, batch: Any) -> None:
        """A batch was drawn from `resume`."""
        self.notes.drew(batch)  # type: ignore[union-attr]

    @_quietly
    def was_given(self, batch: Any) -> None:
        """`run_microbatches` was called."""
        self.notes.was_given(batch)  # type: ignore[union-attr]

    @_quietly
    def ran_backward(self, loss: Tensor, weight: Weight) -> None:
        """Backward was run on a loss."""
        self.notes.ran_backward(loss, weight)  # type: ignore[union-attr]

    @_quietly
    def close_microbatch(self) -> None:
        """The microbatch is complete."""
        self.notes.close_microbatch()  # type: ignore[union-attr]

    @_quietly
    def before_step(self) -> None:
        """The gradients are about to be decided on. The states of our own scaler are replaced, never written to."""
        self._scaler_before = self._run.policy.scale_state

    @_quietly
    def decided(self, numbers: StepNumbers, refused_at_once: bool, evaluated: int = 0) -> None:
        """A step was decided: if it is known to be refused, hold on to what is about to change."""
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
            ["the optimizer evaluates the loss itself, so that only the loss can be compared"] if evaluated else [],
            self._copies(record.signals.step) if self._lag else None,
        )

    def _copies(self, step: int) -> dict[str, Any]:
        """Everything that later steps change, on the host; buffers that the forward wrote as they were before it."""
        run, before = self._run, self._buffers_before(step)

        def copied(tensor: Tensor) -> Tensor:
            return before.get(tensor.data_ptr(), tensor).detach().to("cpu", copy=True)

        return map_tensors({**model_parts(run.models), "optimizer": run.optimizer.state_dict()}, copied)  # type: ignore[no-any-return]

    @_quietly
    def moved_to(self, step: int, under_way: bool) -> None:
        """A saved run was loaded, which may have stopped in the middle of a step."""
        self.notes.moved_to(step, under_way)  # type: ignore[union-attr]
        self._last_refused = -2
        self.pauses.over()

    @_quietly
    def begin(self, step: int) -> None:
        """The step is over."""
        self.notes.begin(step)  # type: ignore[union-attr]

    # ---- when there is something to capture -----------------------------------------------------------------------

    @_quietly
    def refused(self, record: StepRecord, later: Sequence[StepNumbers]) -> None:
        """The host has taken in a refused step, and nothing has been done about it yet.

        `later` are the steps since, whose numbers may still be on their way.
        """
        held = self._held
        if held is not None and held.step <= record.signals.step:
            self._held = None
        wanted = self._wanted(record)
        if self._run.history.budgets.refuses(record):
            self._last_refused = record.signals.step
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

    @_quietly
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
        """Whether the step is refused, the first in a row, and has room."""
        step = record.signals.step
        follows = step - self._last_refused == 1 and not self.pauses.failures
        if not self._run.history.budgets.refuses(record) or follows:
            return False
        return self._has_room(step)

    def _has_room(self, step: int) -> bool:
        return self.pauses.may_try(step) and self._writer.has_room(step)

    def _write(self, record: StepRecord, what: dict[str, Any], applied: int, held: _PendingStep | None) -> None:
        assert self.notes is not None
        place = self._writer.write(record, what, applied, held, self.notes.window(record.signals.step))
        self.pauses.written()
        log.warning("surefoot: the step is kept in %s; `%s` runs it again", place, replay_command(place))


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
    """A keeper for what the user gave: a folder, a keeper, or nothing. Anything else is returned as it is."""
    return IncidentKeeper(incidents) if isinstance(incidents, (str, Path)) else incidents
