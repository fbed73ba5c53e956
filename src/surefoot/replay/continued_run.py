"""One run of `surefoot replay --experiments`, inside its process: apply the captured step, and some more steps.

`continue_from_incident` is called if the order of `surefoot run` contains an incident. A `FirstStep` replaces the
script's first step with the captured state, and the steps that follow are recorded, one row per step, the captured one
first: its losses, its gradient norm, its learning rate, whether it was applied. The run ends after the ordered number
of steps.

Three things differ from the script. A stabilizer refuses and undoes nothing, because a skipped step hides its effect;
its clipping and its loss scale are kept. Learning rates are held at those of the incident, because the script's
schedule is at its beginning. And files that surefoot would write in the script are not written.

A script with a stabilizer is measured by the stabilizer, any other by the watcher: the same code as for the record, so
that the numbers can be compared with those before the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from surefoot.errors import SurefootError
from surefoot.record.facts import CapturedBatch, ContinuedStep, ExperimentFacts
from surefoot.record.incidents.reading import StoredIncident, number, read_incident
from surefoot.record.incidents.values import tensors_in
from surefoot.replay.changed_data import ChangedData
from surefoot.replay.first_step import FirstStep
from surefoot.replay.hooks import install as install_hooks

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from surefoot.experiments.changes.experiment import Experiment

HOPELESS_STEPS = 5
"""After this many consecutive non-finite losses, the run is not expected to recover."""

current: ContinuedRun | None = None
"""The continued run of this process, for `target_loop`."""


class _Measured(NamedTuple):
    """The measurements of one step."""

    loss: float | None
    grad_norm: float | None
    lr: float | None


def continue_from_incident(experiment: Experiment) -> bool:
    """Set everything up; returns whether no further change must be applied."""
    global current
    try:
        incident = read_incident(experiment.order["incident"])
        current = ContinuedRun(experiment, incident)
        return current.prepare()
    except Exception as error:  # end the run at its first step with an error: otherwise the script would run for hours
        message = str(error) if isinstance(error, SurefootError) else f"{type(error).__name__}: {error}"
        experiment.problem = " ".join(message.split())
        return True


class ContinuedRun:
    """Follows the script from its first step on, and records each step."""

    def __init__(self, experiment: Experiment, incident: StoredIncident) -> None:
        self.experiment, self.incident = experiment, incident
        self.follow_steps = int(experiment.order["follow"])
        self.has_target = bool(experiment.order.get("target"))
        self.guarded = incident.facts["configuration"].get("loop") != "bare" and not self.has_target
        self.data = ChangedData(experiment, incident)
        self.first_step: FirstStep | None = None
        self.optimizer: Optimizer | None = None
        self._rows: list[ContinuedStep] = []
        self._open: list[float] = []
        """The losses of the current step."""
        self._stepping = False
        self._rates: list[float | Tensor | None] = []
        self._measured: _Measured | None = None
        """The watcher's measurements of the current step."""
        self._state, self._batch = _broken_state(incident), _broken_batch(incident)
        experiment.add_facts(self._add_facts)

    def prepare(self) -> bool:
        """Install the wrappers. Returns whether no further change must be applied."""
        experiment = self.experiment
        experiment.before_step(self._before_step)
        experiment.after_step(self._after_step)
        experiment.wrapping.around(torch.autograd, "backward", self._around_backward)
        experiment.wrapping.around(GradScaler, "step", self._around_scaler)
        if not self.has_target:
            self.first_step = first_step = FirstStep(self.incident)
            first_step.continues = True
            first_step.begins = self._first_step_begins
            install_hooks(first_step, Path(experiment.order["scratch"]) / "surefoot", **_without_guard())
            if self.guarded:
                self._wrap_stabilizer()
        return self.data.install(self.first_step)

    def _add_facts(self, facts: ExperimentFacts) -> ExperimentFacts:
        return replace(
            facts,
            trail=list(self._rows),
            open=list(self._open),
            state=self._state,
            batch=self._batch,
            rows=None if self.data.rows is None else self.data.rows.found,
            why_not=self.data.why_not,
        )

    def _first_step_begins(self) -> None:
        assert self.first_step is not None
        assert self.first_step.objects is not None
        self.begin(self.first_step.objects.optimizer)

    def begin(self, optimizer: Optimizer) -> None:
        """The captured state is in place: the captured step begins."""
        self.optimizer = optimizer
        self._open.clear()
        groups = optimizer.param_groups
        used, first = number(self.incident.facts["configuration"].get("lr")), number(groups[0].get("lr"))
        # Recovery may have lowered the rates by a factor of the stabilizer's own.
        factor = used / first if first > 0 and math.isfinite(used) else 1.0
        self._rates = [_times(group.get("lr"), factor) for group in groups]

    def _before_step(self, optimizer: Optimizer) -> None:
        if self.data.search is not None and self.optimizer is not None:
            for group in optimizer.param_groups:  # including a model beside the captured one: nothing would restore it
                for tensor in group["params"]:
                    tensor.grad = None
        if optimizer is not self.optimizer:
            return
        # A step that a scaler skipped is not a step of the optimizer, but it is one of the experiment.
        self.experiment.first_step = self.experiment.watcher.steps.record_of(optimizer).series.count - len(self._rows)
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            if rate is not None:
                group["lr"] = rate
        self._stepping = True

    def _after_step(self, optimizer: Optimizer) -> None:
        if optimizer is not self.optimizer or not self._stepping:
            return  # the step before the captured one
        self.experiment.watcher.steps.guard.settle()  # on a device its numbers would arrive some steps later
        row = self.experiment.watcher.steps.record_of(optimizer).series.rows[-1]
        self._measured = _Measured(_plain(row.get("loss")), _plain(row.get("grad_norm")), _plain(row.get("lr")))
        if not self.guarded:
            self._close(self._measured, applied=True)

    def _around_backward(self, original: Any, args: Any, kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self.optimizer is not None and self.experiment.watcher.probes.here():
            losses = self.experiment.watcher.context.losses.values
            if losses:
                self._open.append(float(losses[-1]))
            if self.data.search is not None and losses:
                self.data.search.note_backward(float(losses[-1]), _finite_gradients(self.optimizer))
        return result

    def _around_scaler(self, original: Any, args: Any, kwargs: Any) -> Any:
        known = len(self._rows)
        result = original(*args, **kwargs)
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        left_out = optimizer is self.optimizer and self._open and len(self._rows) == known
        if left_out and not self.guarded and self.data.search is None:
            mean = sum(self._open) / len(self._open)
            self._close(_Measured(mean, None, None), applied=False)
        return result

    def _wrap_stabilizer(self) -> None:
        from surefoot.guard.stabilizer import TrainingStabilizer

        def call(original: Any, args: Any, kwargs: Any) -> Any:
            outcome = original(*args, **kwargs)
            ours = self.optimizer is not None and args[0].optimizer is self.optimizer
            if ours and outcome is not None and not outcome.accumulating and (self._stepping or self._open):
                lr = None if self._measured is None else self._measured.lr
                self._close(_Measured(outcome.loss, outcome.grad_norm, lr), applied=outcome.applied)
            return outcome

        self.experiment.wrapping.around(TrainingStabilizer, "step", call)
        self.experiment.wrapping.around(TrainingStabilizer, "flush", call)

    def _close(self, measured: _Measured, applied: bool) -> None:
        """A step is complete."""
        self._stepping = False
        if self.data.search is not None:
            return
        row = ContinuedStep(
            loss=measured.loss,
            grad_norm=measured.grad_norm,
            lr=measured.lr,
            applied=applied,
            skipped=len(self._rows) in self.experiment.skipped,
            captured_rows=None if self.data.others is None else self.data.others.take_kept(),
        )
        self._rows.append(row)
        self._open.clear()
        self._measured = None
        if len(self._rows) > self.follow_steps or self._is_hopeless():
            self.experiment.end("steps")

    def _is_hopeless(self) -> bool:
        last = self._rows[-HOPELESS_STEPS:]
        return len(last) == HOPELESS_STEPS and all(
            not math.isfinite(number(row.loss)) and not row.skipped for row in last
        )


def _without_guard() -> Mapping[str, Any]:
    """Settings of a stabilizer that clips and scales as in the script, and refuses and undoes nothing."""
    from surefoot.detect.checker import StabilityChecker

    nothing = dict.fromkeys((each.name for each in fields(StabilityChecker)), None)
    return {"checker": StabilityChecker(**nothing), "escalation": None, "recovery": None}


def _broken_state(incident: StoredIncident) -> dict[str, int]:
    """The number of non-finite values before the step, by weight; the step itself may have written buffers."""
    found: dict[str, int] = {}
    trained = tuple(f".{name}" for name in incident.facts["fingerprints"].get("gradients", {}))
    for model in incident.state.get("models", []):
        for name, value in model.items():
            is_weight = any(each.endswith(f".{name}") for each in trained)
            if is_weight and isinstance(value, Tensor) and (bad := _nonfinite(value)):
                found[name] = bad
    return found


def _broken_batch(incident: StoredIncident) -> CapturedBatch:
    """The number of non-finite values of the batch, or of the model's inputs if no batch was captured."""
    microbatches = (incident.state.get("window") or {"microbatches": []})["microbatches"]
    drawn = [tensor for each in microbatches for tensor in tensors_in([each["drawn"], each["given"]])]
    given = drawn or [tensor for each in microbatches for tensor in tensors_in(each["calls"])]
    return CapturedBatch(nonfinite=sum(map(_nonfinite, given)), handed_out=bool(drawn))


def _nonfinite(value: Tensor) -> int:
    return int((~torch.isfinite(value)).sum()) if value.is_floating_point() or value.is_complex() else 0


def _finite_gradients(optimizer: Optimizer) -> bool:
    gradients = [t.grad for group in optimizer.param_groups for t in group["params"] if t.grad is not None]
    return not any(_nonfinite(gradient) for gradient in gradients if gradient.layout is torch.strided)


def _times(rate: Any, factor: float) -> Any:
    if isinstance(rate, Tensor):
        return rate.clone() * factor
    return rate * factor if isinstance(rate, (int, float)) else None


def _plain(value: Any) -> float | None:
    return None if value is None else float(value)
