"""Writes a stabilizer's run into the run log: the numbers of every step, layers at some steps, events and actions.

Handing data over takes about a microsecond; the log's own thread writes it. Layers are most of the data: they are
written at every step at first, then at every tenth, and at every step around an incident. A few sampled steps also have
histograms, dead units and update ratios (`model_sampling.py`).
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from surefoot.core.version import VERSION
from surefoot.errors import SettingError
from surefoot.keep.dead_workers import WORKER_DIED, error_of_worker, worker_death
from surefoot.record.collectives import collective_event, failed_collective
from surefoot.record.facts import GroupSettings, OptimizerSetup
from surefoot.record.incidents.environment import replay_command
from surefoot.record.loader_waits import follow_loaders
from surefoot.record.log import RunLog, part_of
from surefoot.record.messages import LayerRows, StepRow
from surefoot.record.run_folder import describe_run, write_json

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from surefoot.decide.agreement import Ranks
    from surefoot.guard.model_sampling import ModelSampler
    from surefoot.guard.rank_watching import WatchedRank
    from surefoot.keep.checkpoint.manifest import SaveFacts
    from surefoot.record.messages import EventName
    from surefoot.types import Incident, LayerStats, Severity, Signals, StepRecord

LAYERS_AT_FIRST = 100
LAYERS_EVERY = 10
NEAR_STEPS = 20
"""The number of steps before and after an incident whose layers are all written."""

_EVENTS: dict[str, EventName] = {
    "skip": "skip",
    "back_off": "skip",
    "roll_back": "rollback",
    "repeat": "rollback",
    "reset_moments": "rollback",
    "take_back": "rollback",
    "halt": "halt",
}
_OPEN: WeakValueDictionary[Path, RunLog] = WeakValueDictionary()
"""The logs of this process by folder: two stabilizers with the same folder, as for a GAN, share one."""
_SHARED: WeakKeyDictionary[RunLog, int] = WeakKeyDictionary()
"""The number of stabilizers that write into each log."""
_SETUPS: WeakKeyDictionary[object, list[OptimizerSetup]] = WeakKeyDictionary()
"""The optimizers of each log, including those of its parts."""


def open_log(given: Any, ranks: Ranks, setup: OptimizerSetup | None = None) -> RunLog | None:
    """The log for a setting: an existing one, or one in a folder, where each rank has its own.

    `setup` is the optimizer whose steps go into it; `run.json` names it for the diagnosis.
    """
    if given is None:
        return None
    if isinstance(given, RunLog):
        _describe(given, ranks, setup)
        follow_loaders(given)
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise SettingError(f"`log` takes a folder or a RunLog; got {given!r}.")
    folder = Path(given) / f"rank{ranks.place}" if ranks.several else Path(given)
    known = _OPEN.get(folder.absolute())
    if known is None or known.closed:
        _OPEN[folder.absolute()] = known = RunLog(folder)
        _SHARED[known] = 1
        _describe(known, ranks, setup)
        follow_loaders(known)
        return known
    _SHARED[known] += 1
    part = known.part(f"optimizer {_SHARED[known]}")
    _describe(part, ranks, setup)
    return part


def setup_of(optimizer: Optimizer, scheduler: object | None = None) -> OptimizerSetup:
    """The description of an optimizer for the diagnosis."""
    groups = [GroupSettings.of(group) for group in optimizer.param_groups[:8]]
    name = type(scheduler).__name__ if scheduler is not None else None
    return OptimizerSetup(type=type(optimizer).__name__, settings=groups, scheduler=name)


def _describe(log: RunLog, ranks: Ranks, setup: OptimizerSetup | None) -> None:
    """Write `run.json`: what is running, since when, with which versions, and with which optimizers."""
    whole, part = part_of(log)
    folder = log.folder
    if whole not in _SETUPS:
        _remove_earlier_diagnosis(folder)
    setups = _SETUPS.setdefault(whole, [])
    setups.extend([replace(setup, part=part)] if setup is not None else [])
    facts = describe_run(sys.argv[0] or "python", tuple(sys.argv[1:]), False, True, time.time())
    facts |= {"rank": ranks.place, "world_size": ranks.count, "torch": torch.__version__, "surefoot": VERSION}
    facts |= {"optimizers": [each.to_json() for each in setups]} if setups else {}
    with suppress(OSError):  # the log reports a full disk or missing permissions
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "run.json", facts)


def _remove_earlier_diagnosis(folder: Path) -> None:
    """Remove the facts and findings of an earlier process: they do not describe the steps that follow."""
    for name in ("facts.json", "findings.json"):
        with suppress(OSError):
            (folder / name).unlink()


class LogRows:
    """Writes one stabilizer's run into a log."""

    def __init__(
        self,
        log: RunLog,
        sampler: ModelSampler | None,
        *,
        keeps_incidents: bool = False,
        rank: WatchedRank | None = None,
    ) -> None:
        """Write into `log`. With `keeps_incidents`, a refused step is logged only when `release` is called."""
        self.log, self.sampler = log, sampler
        self.rank = rank
        """This rank among several, if it is observed."""
        self._keeps_incidents = keeps_incidents
        self._held: Incident | None = None
        """A refused step, until it is known whether it is kept in a folder."""
        self._returning: Incident | None = None
        """A return to an earlier moment, until it is carried out."""
        self._kept: tuple[int, dict[str, str]] | None = None
        """The last captured step, with its folder and the command that replays it."""
        self._recent: deque[Signals] = deque(maxlen=NEAR_STEPS)
        """The last steps whose layers were not written."""
        self._all_until = LAYERS_AT_FIRST

    def step(self, record: StepRecord) -> None:
        """The numbers of a step have arrived."""
        signals: Any = record.signals
        if self.rank is not None:
            self.rank.clock.stepped(signals.step + 1)
        self.numbers(
            signals.step,
            loss=signals.loss,
            grad_norm=signals.grad_norm,
            clip_factor=signals.clip_factor,
            lr=signals.lr,
            loss_scale=signals.loss_scale,
            nonfinite=signals.nonfinite,
            skipped=record.skipped,
            signals=signals.extra,
        )
        if record.overflow:
            scale = f"{signals.loss_scale:g}"
            self.log.event("overflow", signals.step, f"fp16 gradients overflowed at loss scale {scale}", action="skip")
        if signals.layers is not None:
            self._take_layers(signals)
        if self.sampler is not None:
            for message in self.sampler.arrived(signals.step):
                self.log.take(message)

    def numbers(self, step: int, **columns: Any) -> None:
        """Write only the numbers of a step; the columns are those of `StepRow`."""
        self.log.take(StepRow(step, time.time(), **columns))

    def _take_layers(self, signals: Signals) -> None:
        at_once = signals.step < self._all_until or signals.step % LAYERS_EVERY == 0
        if at_once or (self.sampler is not None and self.sampler.has(signals.step)):
            self._write_layers(signals)
        else:
            self._recent.append(signals)

    def incident(self, incident: Incident) -> None:
        """An incident has happened."""
        self.release()
        if incident.action == "repeat":  # logged after the return; otherwise its line would be superseded too
            self._returning = incident
        elif self._keeps_incidents and incident.severity == "error" and incident.action != "none":
            self._held = incident
        else:
            self._write_event(incident)
        while self._recent:
            self._write_layers(self._recent.popleft())
        self._all_until = max(self._all_until, incident.step + NEAR_STEPS)

    def kept(self, step: int, place: Path) -> None:
        """A step was captured in a folder: the pending or next event of the same step names it."""
        self._kept = step, {"incident": str(place), "replay": replay_command(place)}

    def release(self) -> None:
        """Log the pending event: by now it is known whether its step was captured."""
        for held in (self._held, self._returning):
            if held is not None:
                self._write_event(held)
        self._held = self._returning = None

    def _write_event(self, incident: Incident) -> None:
        kept = self._kept[1] if self._kept is not None and self._kept[0] == incident.step else {}
        self._kept = None if kept else self._kept
        name = _EVENTS.get(incident.action) or ("spike" if "spike" in incident.kind else "alarm")
        self.log.event(
            name,
            incident.step,
            incident.summary,
            severity=incident.severity,
            cause=incident.kind,
            action="" if incident.action == "none" else incident.action,
            evidence={**incident.evidence, **kept},
        )

    def failed(self, error: BaseException, step: int) -> str:
        """A step raised an error. It is logged as an event if a collective of several ranks failed.

        Returns a sentence that names the rank that has ended, if that is known to be the reason.
        """
        failed = failed_collective(error)
        if failed is None:
            return ""
        self.log.take(collective_event(failed, step))
        return self.rank.lost() if self.rank is not None else ""

    def loader_failed(self, error: Exception, step: int, saved: bool) -> None:
        """A data loader has raised an error between two steps; `saved`: the complete steps are in a checkpoint."""
        died = worker_death(str(error_of_worker(error)))
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}" if died is None else died.how
        after = f"the checkpoint of step {step:,} is saved" if saved else "no checkpoint was saved"
        self.log.event(
            "alarm",
            max(0, step - 1),  # the last completed step: a resumed run supersedes later ones
            f"the data loader failed after {step:,} steps: {what}; {after}",
            severity="error",
            cause="loader.failed" if died is None else WORKER_DIED,
            evidence={"error": type(error).__name__, "saved": saved},
        )

    def saved(self, step: int, folder: Path, facts: SaveFacts) -> None:
        """A checkpoint is on disk. Called by the thread that wrote it."""
        kind = "good" if facts["finite"] and facts["quiet"] else "kept as evidence"
        evidence = {"checkpoint": str(folder), "metric": facts["metric"]}
        self.log.event("checkpoint", step, f"checkpoint of step {step:,} saved ({kind})", evidence=evidence)

    def failing(self, step: int, message: str, evidence: dict[str, Any]) -> None:
        """Checkpoints cannot be written, or can be again. Called by the thread that writes them."""
        severity: Severity = "error" if evidence["failures"] else "info"
        self.log.event("alarm", step, message, severity=severity, cause="checkpoint.failed", evidence=evidence)

    def resumed(self, step: int, folder: Path) -> None:
        """The run continues from a checkpoint."""
        evidence = {"checkpoint": str(folder)}
        self.log.event("resume", step, f"continues from the checkpoint of step {step:,}", evidence=evidence)

    def returned_to(self, step: int) -> None:
        """The run has returned to `step`: rows and events of that step and later ones are superseded.

        The event of the return belongs to the last step that is kept.
        """
        returning, self._returning = self._returning, None
        self.release()
        self._recent.clear()
        self.log.begin_session()
        if returning is not None:
            evidence = {**returning.evidence, "decided_at": returning.step}
            self._write_event(replace(returning, step=max(step - 1, 0), evidence=evidence))

    def _write_layers(self, signals: Signals) -> None:
        layers = signals.layers
        assert layers is not None
        sampled = {} if self.sampler is None else self.sampler.layer_columns(signals.step, layers.names)
        columns = sampled | _columns(layers)
        self.log.take(LayerRows(signals.step, layers.names, columns))


def _columns(layers: LayerStats) -> dict[str, Any]:
    columns = {
        "grad_norm": layers.grad_norm,
        "grad_largest": layers.grad_largest,
        "nonfinite": layers.nonfinite,
        "param_norm": layers.param_norm,
        "update_ratio": layers.update_to_weight,
    }
    return {name: values for name, values in columns.items() if values is not None}
