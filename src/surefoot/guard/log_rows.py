"""What a stabilizer writes into the run log: every step's numbers, layers now and then, and what was done about what.

All of it is handed over as it is, in a microsecond or so; the log's own thread does the writing. Layers are the bulk:
they go in at every step at first, then at every tenth, and at every step around an incident. On a few sampled steps
there are histograms too, dead units and update ratios (`model_sampling.py`).
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
from surefoot.record.facts import GroupSettings, OptimizerSetup
from surefoot.record.failed_collectives import collective_event, failed_collective
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
    from surefoot.keep.checkpoint.storage import SaveFacts
    from surefoot.record.messages import EventName
    from surefoot.types import Incident, LayerStats, Severity, Signals, StepRecord

LAYERS_AT_FIRST = 100
LAYERS_EVERY = 10
NEAR_STEPS = 20
"""Steps before and after an incident whose layers are all written."""

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
"""The logs of this process by folder: two stabilizers that name the same one, as for a GAN, share it."""
_SHARED: WeakKeyDictionary[RunLog, int] = WeakKeyDictionary()
"""How many stabilizers write into each."""
_SETUPS: WeakKeyDictionary[object, list[OptimizerSetup]] = WeakKeyDictionary()
"""The optimizers of each log, those of its parts included."""


def open_log(given: Any, ranks: Ranks, setup: OptimizerSetup | None = None) -> RunLog | None:
    """The log that was asked for: one that is there, or one in a folder; each rank has its own in there.

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
    """What a diagnosis wants to know of an optimizer."""
    groups = [GroupSettings.of(group) for group in optimizer.param_groups[:8]]
    name = type(scheduler).__name__ if scheduler is not None else None
    return OptimizerSetup(type=type(optimizer).__name__, settings=groups, scheduler=name)


def _describe(log: RunLog, ranks: Ranks, setup: OptimizerSetup | None) -> None:
    """`run.json`: what is running, since when, with which versions, and with which optimizers."""
    whole, part = part_of(log)
    setups = _SETUPS.setdefault(whole, [])
    setups.extend([replace(setup, part=part)] if setup is not None else [])
    folder = log.folder
    facts = describe_run(sys.argv[0] or "python", tuple(sys.argv[1:]), False, True, time.time())
    facts |= {"rank": ranks.place, "world_size": ranks.count, "torch": torch.__version__, "surefoot": VERSION}
    facts |= {"optimizers": [each.to_json() for each in setups]} if setups else {}
    with suppress(OSError):  # the log will say that there is no room, or no right
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "run.json", facts)


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
        """Write into `log`. With `keeps_incidents` a refused step is logged when `release` is called."""
        self.log, self.sampler = log, sampler
        self.rank = rank
        """This rank as one of several, if it is watched."""
        self._keeps_incidents = keeps_incidents
        self._held: Incident | None = None
        """A refused step, until it is known whether it is kept in a folder."""
        self._returning: Incident | None = None
        """A return to an earlier moment, until it is made."""
        self._kept: tuple[int, dict[str, str]] | None = None
        """The step that was kept last, with its folder and the command that runs it again."""
        self._recent: deque[Signals] = deque(maxlen=NEAR_STEPS)
        """The last steps whose layers were not written."""
        self._all_until = LAYERS_AT_FIRST

    def step(self, record: StepRecord) -> None:
        """A step's numbers have arrived."""
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
        """A row of a step's numbers and nothing else; the columns are those of `StepRow`."""
        self.log.take(StepRow(step, time.time(), **columns))

    def _take_layers(self, signals: Signals) -> None:
        at_once = signals.step < self._all_until or signals.step % LAYERS_EVERY == 0
        if at_once or (self.sampler is not None and self.sampler.has(signals.step)):
            self._write_layers(signals)
        else:
            self._recent.append(signals)

    def incident(self, incident: Incident) -> None:
        """Something happened that a person should know about."""
        self.release()
        if incident.action == "repeat":  # logged once the run has gone back, or its line would be superseded too
            self._returning = incident
        elif self._keeps_incidents and incident.severity == "error" and incident.action != "none":
            self._held = incident
        else:
            self._write_event(incident)
        while self._recent:
            self._write_layers(self._recent.popleft())
        self._all_until = max(self._all_until, incident.step + NEAR_STEPS)

    def kept(self, step: int, place: Path) -> None:
        """A step is kept in a folder: the event of the same step that is held, or comes next, names it."""
        self._kept = step, {"incident": str(place), "replay": replay_command(place)}

    def release(self) -> None:
        """Log what is held: by now a step that is to be kept is kept."""
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
        """A step raised an error, which is an event if a collective of several ranks failed.

        Returns which rank has left, in one sentence, if that is known to be the reason.
        """
        failed = failed_collective(error)
        if failed is None:
            return ""
        self.log.take(collective_event(failed, step))
        return self.rank.lost() if self.rank is not None else ""

    def loader_failed(self, error: Exception, step: int, saved: bool) -> None:
        """A data loader has raised an error between two steps; whether the complete steps are in a checkpoint."""
        died = worker_death(str(error_of_worker(error)))
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}" if died is None else died.how
        after = f"the checkpoint of step {step:,} is saved" if saved else "no checkpoint was saved"
        self.log.event(
            "alarm",
            max(0, step - 1),  # the last step that was made: a run that is resumed supersedes what comes later
            f"the data loader failed after {step:,} steps: {what}; {after}",
            severity="error",
            cause="loader.failed" if died is None else WORKER_DIED,
            evidence={"error": type(error).__name__, "saved": saved},
        )

    def saved(self, step: int, folder: Path, facts: SaveFacts) -> None:
        """A checkpoint is on the disk. Called by the thread that wrote it."""
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

    def went_back(self, step: int) -> None:
        """The run has gone back to `step`: rows and events of that step and later ones are superseded.

        The event of the return is of the last step that stands.
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
