"""What `surefoot run` writes to the run log: the numbers of each step, layers of sampled steps, and events.

The log has the same format as that of a `TrainingStabilizer`, so all views of a run support both. It begins with the
first step: a script that does not train has no log. A script that has loaded its own checkpoint before that step, and
whose folder already contains a run, continues it: the steps in the log are those since the beginning of that run.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from surefoot.guard.log_rows import LogRows
from surefoot.observe.readable import readable
from surefoot.record.facts import (
    ActivationCall,
    FileSavedEvent,
    LayerCall,
    ModelLoadedEvent,
    NonFiniteGradientEvent,
    NonFiniteLossEvent,
    SpikeEvent,
    StepSkippedEvent,
)
from surefoot.record.messages import LayerRows
from surefoot.types import NamedParameter
from surefoot.watch.layer_calls import output_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from surefoot.diagnose.findings import Diagnosis
    from surefoot.guard.model_sampling import ArrivingHistograms
    from surefoot.observe.histograms import Sample
    from surefoot.record.facts import Event, ParameterUpdate, SampledStep
    from surefoot.record.log import RunLog
    from surefoot.record.messages import Event as LoggedEvent
    from surefoot.record.messages import EventName
    from surefoot.types import Severity
    from surefoot.watch.parameter_registry import ParameterRegistry

    OpenLog: TypeAlias = Callable[[int], tuple[RunLog, int] | None]
    """Opens the run log. Gets the number of steps that the script has taken before; also returns that number if the
    folder contains them, and otherwise 0."""

_EMPTY: dict[str, None] = dict.fromkeys(
    ("loss", "lr", "scale", "skipped", "grad_norm", "clip_norm", "clip_limit", "clip_by_value")
)
"""The numbers that a row may lack."""
SPIKE_SHARE = 0.1
"""A spike is logged if it undoes this share of the decrease of the loss: near its floor, a loss often doubles."""


class WatchLog:
    """Writes the rows, sampled steps and events of a watched run to its log."""

    def __init__(
        self,
        open_log: OpenLog,
        registry: ParameterRegistry,
        steps_before: Callable[[], int] = lambda: 0,
    ) -> None:
        """Write the steps of a run.

        Args:
            open_log: opens the log.
            registry: the names of the parameters.
            steps_before: the number of steps that the script has taken before, according to the checkpoint that it has
                loaded; 0 if it began anew.
        """
        self._open_log, self._registry, self._steps_before = open_log, registry, steps_before
        self._began = 0
        """The number of steps that earlier parts of the run have taken."""
        self._log: RunLog | None = None
        self._opened = False
        self._histograms_at: dict[str, int] = {}
        """The next step with histograms of the parameters of each part."""
        self.outputs_from_step = 0
        """The step from which histograms of the outputs of layers are written again: less and less often."""
        self._arriving: list[ArrivingHistograms] = []
        """The histograms of sampled steps that are not on the host yet."""
        self._parts: dict[int, str] = {}
        self._writers: dict[int, LogRows] = {}
        """The guard's writer of step rows, for each optimizer."""
        self._clips: dict[int, bool] = {}
        """Whether the script clipped the gradients of the optimizer, and nothing else, at its last measured step."""
        self._steps: dict[int, int] = {}
        """The last step of each optimizer that was written."""

    @property
    def log(self) -> RunLog | None:
        """The log, which is opened when it is first needed."""
        if not self._opened:
            self._opened = True
            opened = self._open_log(self._steps_before())
            if opened is not None:
                self._log, self._began = opened
        return self._log

    def step(self, row: Mapping[str, Any], optimizer: int) -> None:
        """Write one optimizer's step. All its numbers have been read."""
        log = self._log if self._opened else self.log
        if log is None:
            return
        row = {**_EMPTY, "at": row["step"], **row}
        if optimizer not in self._writers:
            self._writers[optimizer] = LogRows(log.part(self._part(optimizer)), None)
            self._clips[optimizer], self._steps[optimizer] = False, -1
        clipping = _clipping(row, self._clips[optimizer])
        if row["grad_norm"] is not None:
            self._clips[optimizer] = clipping["clip_factor"] is not None
        # An optimizer that was made late may step twice in one step of the run; it still gets two rows.
        step = self._steps[optimizer] = max(int(row["at"]), self._steps[optimizer] + 1)
        self._writers[optimizer].numbers(
            self._began + step,
            loss=row["loss"],
            lr=row["lr"],
            loss_scale=row["scale"],
            skipped=bool(row["skipped"]),
            **clipping,
        )

    def _part(self, optimizer: int) -> str:
        """The name of an optimizer, fixed at its first step, because all rows of one part must have the same name."""
        if optimizer not in self._parts:
            self._parts[optimizer] = part_name(optimizer, self._registry)
        return self._parts[optimizer]

    def sampled_tensors(self, facts: SampledStep, outputs: Sequence[tuple[str, Sample]] = ()) -> None:
        """Write histograms of weights, gradients and the outputs of layers at the end of a sampled step.

        The numbers of the step may not have been read yet.
        """
        if self.log is None:
            return
        for update in facts.updates:
            names = [self._registry.label(self._registry.parameters[row.parameter]) for row in update.rows]
            self._histograms(facts.step, update.rows, names, self._part(update.optimizer))
        if outputs:
            from surefoot.guard.model_sampling import ArrivingHistograms

            self.outputs_from_step = max(facts.step + 1, 2 * facts.step)
            self._arriving.append(ArrivingHistograms([], self._began + facts.step, outputs=outputs))

    def sampled_step(self, facts: SampledStep) -> None:
        """Write what a sampled step recorded about each parameter and each activation. All numbers have been read."""
        log = self.log
        if log is None:
            return
        self._write_histograms()  # their copy began before that of the numbers
        for update in facts.updates:
            rows = update.rows
            names = [self._registry.label(self._registry.parameters[row.parameter]) for row in rows]
            columns: dict[str, list[Any]] = {
                "grad_norm": [row.grad for row in rows],
                "grad_largest": [row.largest for row in rows],
                "nonfinite": [row.nonfinite for row in rows],
                "param_norm": [row.weight for row in rows],
                "update_ratio": [row.ratio for row in rows],
            }
            part = self._part(update.optimizer)
            log.take(LayerRows(self._began + facts.step, names, columns, part))
        names, columns = _activations(facts)
        if names:
            log.take(LayerRows(self._began + facts.step, names, columns))

    def _histograms(self, step: int, rows: list[ParameterUpdate], names: list[str], part: str) -> None:
        """Add the histograms of weights and gradients, at some of the sampled steps."""
        if step < self._histograms_at.get(part, 0) or self._log is None:
            return
        from surefoot.guard.model_sampling import ArrivingHistograms

        self._histograms_at[part] = max(step + 1, 2 * step)
        tensors = [self._registry.parameters[row.parameter].tensor() for row in rows]
        named = [
            NamedParameter(name, tensor)
            for name, tensor in zip(names, tensors, strict=True)
            if tensor is not None and readable(tensor) is not None
        ]
        self._arriving.append(ArrivingHistograms(named, self._began + step, part))

    def _write_histograms(self) -> None:
        """Write the histograms that are being copied; those that a device has lost are left out."""
        arriving, self._arriving = self._arriving, []
        for each in arriving:
            with suppress(RuntimeError):
                for histogram in each.messages():
                    if self._log is not None:
                        self._log.take(histogram)

    def event(self, event: Event) -> None:
        """Write an event of a step."""
        if _is_small(event):
            return
        shown = _shown(event)
        if shown is not None:
            self._write(event.step, event.TAG[1], *shown)

    def notice(self, event: LoggedEvent) -> None:
        """Write an event that another thread has found. Before the first step there is no log: the event is lost."""
        if self._log is not None:
            self._log.take(replace(event, step=_later(event.step, self._began)))

    def kept(self, step: int, folder: Path, command: str) -> None:
        """Write that a bad step was captured in a folder; `command` replays it."""
        log = self.log
        if log is not None:
            evidence = {"incident": str(folder), "replay": command}
            step = self._began + step
            log.event("alarm", step, "the first bad step was captured", cause="incident", evidence=evidence)

    def overflow(self, step: int, scale: float | None) -> None:
        """Write that a gradient scaler has skipped a step."""
        at = f" at loss scale {scale:g}" if scale is not None else ""
        self._write(step, "overflow", "overflow", "info", f"the scaler skipped the step: gradients overflowed{at}", [])

    def _write(
        self, step: int | None, cause: str, name: EventName, severity: Severity, summary: str, parameters: list[str]
    ) -> None:
        log = self.log
        if log is not None:
            action = "skip" if name == "skip" else ""
            evidence = {"parameters": parameters} if parameters else {}
            step = _later(step, self._began)
            log.event(name, step, summary, severity=severity, cause=cause, action=action, evidence=evidence)

    def end(self, diagnosis: Diagnosis, code: int | None) -> None:
        """Write the end of the run, with its diagnosis."""
        log = self._log
        if log is None:
            return
        self._write_histograms()
        for finding in diagnosis.findings:
            evidence = {"confidence": finding.confidence, "where": list(finding.where)}
            log.event(
                "finding",
                _later(finding.step, self._began),
                finding.summary,
                severity=finding.severity,
                cause=finding.cause,
                evidence=evidence,
            )
        summary = f"{diagnosis.verdict}; exit code {code if code is not None else 0}"
        evidence = {
            "verdict": diagnosis.verdict,
            "cause": diagnosis.serious[0].cause if diagnosis.serious else "",
            "why": diagnosis.summary,
        }
        log.event("end", self._began + diagnosis.steps, summary, evidence=evidence)
        log.close()


def _later(step: int | None, began: int) -> int | None:
    """A step of this process as a step of the whole run."""
    return None if step is None else began + step


def _activations(facts: SampledStep) -> tuple[list[str], dict[str, list[Any]]]:
    """The names of layers and activation functions in the order of their calls, and statistics of their last output."""
    rows: dict[str, tuple[Any, ...]] = {}
    calls: list[LayerCall | ActivationCall] = [*facts.calls.layers, *facts.calls.activations]
    for call in sorted(calls, key=lambda call: call.index):
        name = output_name(call.module, call.op)
        if isinstance(call, LayerCall):
            rows[name] = call.out_mean, call.out_std, call.out_largest, None, None
        else:
            dead = (call.dead or 0) / call.units if call.units else None
            rows[name] = call.mean, call.std, call.largest, dead, call.saturated
    names = ("activation_mean", "activation_std", "activation_largest", "dead_share", "saturated_share")
    return list(rows), {name: [row[i] for row in rows.values()] for i, name in enumerate(names)}


def part_name(optimizer: int, registry: ParameterRegistry) -> str:
    """The name of an optimizer's part: empty for the only one, its model if no other trains it, or `optimizer 2`."""
    owners: dict[str, set[int]] = {}
    for record in registry.parameters:
        if record.optimizers:
            owners.setdefault(record.model, set()).update(record.optimizers)
    if not set().union(*owners.values()) - {optimizer}:
        return f"optimizer {optimizer + 1}" if optimizer else ""
    mine = [model for model, numbers in owners.items() if optimizer in numbers]
    alone = len(mine) == 1 and mine[0] and owners[mine[0]] == {optimizer}
    return mine[0] if alone else f"optimizer {optimizer + 1}"


def _clipping(row: Mapping[str, Any], fitted: bool) -> dict[str, Any]:
    """The gradient norm before clipping, and what clipping multiplied it by.

    The norm in the row is the one that the optimizer was given. If the script clips by norm, the norm before is the one
    that clipping returned, provided that the two are consistent: the script may have clipped something else. For a step
    that was not measured, `fitted` is whether they were consistent at the last measured one.
    """
    given, found, limit = row["grad_norm"], row["clip_norm"], row["clip_limit"]
    if found is None or not limit or row["clip_by_value"] or (given is None and not fitted):
        return {"grad_norm": given, "clip_factor": None}
    factor = min(1.0, limit / found) if found > 0 else 1.0
    if given is not None and not abs(found * factor - given) <= 0.05 * given:
        return {"grad_norm": given, "clip_factor": None}
    return {"grad_norm": found, "clip_factor": factor}


def _is_small(event: Event) -> bool:
    """Whether an event is routine: weights loaded before the first step, or a spike that undoes little."""
    if isinstance(event, SpikeEvent):
        return event.value - event.level < SPIKE_SHARE * (event.began - event.level)
    return isinstance(event, ModelLoadedEvent) and event.step == 0


def _shown(event: Event) -> tuple[EventName, Severity, str, list[str]] | None:
    """The name, severity, sentence and parameters of an event in the log; `None` for events that are not logged."""
    match event:
        case NonFiniteLossEvent():
            return "alarm", "error", f"the loss is {event.value}", event.parameters or []
        case NonFiniteGradientEvent(parameters=names):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            words = f"the gradient of {names[0]}{more} is not finite" if names else "a gradient is not finite"
            return "alarm", "error", words, names
        case SpikeEvent(value=value, level=level):
            return "spike", "info", f"the loss is {value:.4g}; the steps before it were around {level:.4g}", []
        case StepSkippedEvent(parameters=names):
            more = f" and {event.of - 1} more" if event.of > 1 else ""
            which = f"the gradient of {names[0]}{more}" if names else " and ".join(event.settings) or "its loss"
            return "skip", "error", f"the step was skipped: {which} is not finite", names
        case FileSavedEvent():
            return "checkpoint", "info", f"saved at {event.site}: {', '.join(event.holds or ['a file'])}", []
        case ModelLoadedEvent():
            return "resume", "info", f"weights were loaded at {event.site}", []
        case _:
            return None
