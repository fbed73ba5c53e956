"""What happened in a run: the events for the diagnosis, which the run log receives too."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from surefoot.observe.histograms import Sample
    from surefoot.record.facts import Event, SampledStep, StepSkippedEvent
    from surefoot.watch.log_rows import WatchLog
    from surefoot.watch.probe_runner import ProbeRunner
    from surefoot.watch.step_rows import SeriesRow

MOST_SKIPS = 200
"""Events of skipped steps that the facts hold; the run log has its own limit."""


class EventRecorder:
    """Collects events, and passes events, step rows and sampled steps on to the run log if there is one."""

    def __init__(self, probes: ProbeRunner, log: WatchLog | None) -> None:
        self._probes, self.log = probes, log
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        """Add an event to the facts and to the log."""
        self.events.append(event)
        self._log_event(event)

    def add_skip(self, event: StepSkippedEvent, count: int) -> None:
        """Add a skipped step, the `count`th one so far."""
        if count <= MOST_SKIPS:
            self.events.append(event)
        self._log_event(event)

    def _log_event(self, event: Event) -> None:
        if self.log is not None:
            self._probes.safely("run log", self.log.event, event)

    def log_kept(self, step: int, folder: Path, command: str) -> None:
        """Write to the log that a bad step is kept, and the command that runs it again."""
        if self.log is not None:
            self._probes.safely("run log", self.log.kept, step, folder, command)

    def log_overflow(self, step: int, scale: float | None) -> None:
        """Write to the log that a gradient scaler has skipped a step."""
        if self.log is not None:
            self._probes.safely("run log", self.log.overflow, step, scale)

    def log_step(self, optimizer: int, row: SeriesRow) -> None:
        """Write the row of a step, all numbers read."""
        if self.log is not None:
            self._probes.safely("run log", self.log.step, row, optimizer)

    def step_writer(self, optimizer: int) -> Callable[[SeriesRow], None]:
        """`log_step` for one optimizer."""
        return partial(self.log_step, optimizer)

    def log_sampled_tensors(self, facts: SampledStep, outputs: Sequence[tuple[str, Sample]]) -> None:
        """Write how weights, gradients and the outputs of layers are spread at the end of a sampled step."""
        if self.log is not None:
            self._probes.safely("run log", self.log.sampled_tensors, facts, outputs)

    def log_sampled_step(self, facts: SampledStep) -> None:
        """Write what a sampled step saw of each layer."""
        if self.log is not None:
            self._probes.safely("run log", self.log.sampled_step, facts)
