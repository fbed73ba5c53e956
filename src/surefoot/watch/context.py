"""The options, the state and the records of a run, shared by the parts of the watcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from surefoot.record.facts import FileLoadedEvent, LoaderFacts, SchedulerFacts
from surefoot.record.stragglers import StepClock
from surefoot.watch.accumulated_loss import StepLosses
from surefoot.watch.log_rows import WatchLog
from surefoot.watch.measuring_budget import MeasuringBudget
from surefoot.watch.module_memory import ModuleMemoryNotes
from surefoot.watch.optimizer_record import OptimizerRecords
from surefoot.watch.parameter_registry import ParameterRegistry
from surefoot.watch.probe_runner import ProbeRunner
from surefoot.watch.step_data import StepData
from surefoot.watch.watch_state import WatchState

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable
    from pathlib import Path

    from surefoot.record.facts import (
        ClippingFacts,
        DrawnBatch,
        Event,
        PolicyDivergence,
        PolicyEntropy,
        RunFacts,
        StepSkippedEvent,
    )
    from surefoot.watch.log_rows import OpenLog
    from surefoot.watch.step_rows import ClipColumns


_Given = ParamSpec("_Given")

MOST_SAMPLED_STEPS = 48


@dataclass(frozen=True)
class WatchOptions:
    """What is observed in a run, and where the results go."""

    guard: bool = False
    """Whether steps whose gradients are not finite are skipped."""
    open_log: OpenLog | None = None
    """Opens the run log, at the first step; `None`: no log is written."""
    save: Callable[[RunFacts], None] | None = None
    """Writes the facts during the run; `None`: they are only returned at the end."""
    folder: Callable[[], Path] | None = None
    """The run folder, where the first bad step is kept; `None`: it is not kept."""
    rank: int = 0
    world_size: int = 1
    most_sampled_steps: int = MOST_SAMPLED_STEPS
    eager_looks: bool = False
    """Whether compiled models run eagerly in sampled steps, which changes the bits of the run."""
    is_preflight: bool = False
    """Whether these are the few steps of a preflight: on a device, as many of them are sampled as on a CPU."""


@dataclass
class ScriptCalls:
    """Calls of the script, recorded as they happen."""

    schedulers: list[SchedulerRecord] = field(default_factory=list)
    clips: list[ClippingFacts] = field(default_factory=list)
    last_clip: ClipColumns | None = None
    """The limit and the norm of the last clipping since the last step."""
    loaders: list[LoaderRecord] = field(default_factory=list)
    batches: list[DrawnBatch] = field(default_factory=list)
    seeds: dict[str, list[int]] = field(default_factory=dict)
    reseeds: dict[str, list[int]] = field(default_factory=dict)
    policy: list[PolicyEntropy] = field(default_factory=list)
    divergences: list[PolicyDivergence] = field(default_factory=list)


@dataclass
class SchedulerRecord:
    """A learning-rate scheduler, held weakly, and its position."""

    ref: weakref.ref[Any]
    type: str
    site: str
    steps: int = 0
    last_epoch: int = 0
    optimizer: int | None = None
    settings: dict[str, bool | int | float] | None = None
    """Its settings at its first step."""

    def as_facts(self) -> SchedulerFacts:
        """Everything except the scheduler itself."""
        return SchedulerFacts.from_record(self)


@dataclass
class LoaderRecord:
    """A data loader, held weakly, and the number of passes over it."""

    ref: weakref.ref[Any]
    number: int
    batch_size: int | None
    sampler: str
    shuffles: bool
    workers: int
    rows: int | None
    batches: int | None
    site: str
    weights: int | None = None
    iterations: int = 0
    drawn: int = 0

    def as_facts(self) -> LoaderFacts:
        """Everything except the loader itself."""
        return LoaderFacts.from_record(self)


class WatchContext:
    """Built once, and passed to the constructor of every part of the watcher."""

    def __init__(self, options: WatchOptions) -> None:
        self.options = options
        self.state = WatchState()
        self.probes = ProbeRunner(self.state)
        self.registry = ParameterRegistry()
        self.optimizers = OptimizerRecords()
        open_log = options.open_log
        log = WatchLog(open_log, self.registry, self._steps_before) if open_log is not None else None
        self.events = EventRecorder(self.probes, log)
        self.losses = StepLosses()
        self.measuring = MeasuringBudget()
        self.data = StepData(self.measuring)
        self.calls = ScriptCalls()
        self.module_memory = ModuleMemoryNotes()
        self.step_clock = StepClock() if options.world_size > 1 else None
        """Follows the steps of one of several ranks."""

    def _steps_before(self) -> int:
        """The number of steps that the loaded optimizers have taken, or that the loaded checkpoint names; 0 for none.

        Weights alone are not enough: a script that begins with pretrained ones is a new run.
        """
        loaded = [each for each in self.optimizers.all if each.loaded_at == 0]
        ages = [int(each.loaded_age) for each in loaded if each.loaded_age is not None]
        files = [each for each in self.events.events if isinstance(each, FileLoadedEvent) and each.step == 0]
        named = [each.progress for each in files if loaded and each.progress is not None]
        return max(ages or named, default=0)


MOST_SKIPS = 200
"""The maximum number of skipped steps in the facts; the run log has its own limit."""


class EventRecorder:
    """Collects events, and passes events, step rows and sampled steps on to the run log if there is one."""

    def __init__(self, probes: ProbeRunner, log: WatchLog | None) -> None:
        self._probes, self.log = probes, log
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        """Add an event to the facts and to the log."""
        self.events.append(event)
        self.write(WatchLog.event, event)

    def add_skip(self, event: StepSkippedEvent, count: int) -> None:
        """Add a skipped step, the `count`th one so far."""
        if count <= MOST_SKIPS:
            self.events.append(event)
        self.write(WatchLog.event, event)

    def write(
        self, method: Callable[Concatenate[WatchLog, _Given], None], *args: _Given.args, **kwargs: _Given.kwargs
    ) -> None:
        """Call a method of the run log, if there is one."""
        if self.log is not None:
            self._probes.safely("run log", partial(method, self.log, *args, **kwargs))

    def logs_outputs(self, step: int) -> bool:
        """Whether histograms of layer outputs are logged at a sampled step."""
        return self.log is not None and step >= self.log.outputs_from_step
