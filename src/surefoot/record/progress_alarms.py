"""Alarms about the progress of a run: no step for long, slower than before, a checkpoint that is overdue.

The run log's own thread derives them from what is logged anyway, so they cost the training loop nothing and are the
same for every source. Each is an event `alarm` of severity `warning`, without an action. It is repeated after twice the
time, and an event of severity `info` reports its end.

Observable facts distinguish a healthy run from one that is reported:

- **A sleeping laptop**, a stopped process, a paused virtual machine: the log's own thread does not run either. Time is
  counted in ticks of that thread, and a tick that comes late counts for `LONGEST_TICK_SECONDS` at most.
- **Evaluation** draws batches from a data loader, and each is a sign of progress (`record/loader_waits.py`). The
  longest earlier pause of the run is remembered, and an alarm needs `QUIET_TIMES` that time.
- **Pace** is measured over stretches of at least `STRETCH_SECONDS` and `STRETCH_STEPS`. An evaluation, a checkpoint,
  the start of an epoch and a pause lengthen the stretch they fall into. An alarm needs three quarters of the last
  stretches to be slower than the typical earlier one by the factor `slower_times`, and slower than nine in ten of all
  stretches so far: a run whose pace always varies by that much is not reported.
- **Checkpoints** are expected if a part with a schedule announces them (`CheckpointsExpected`). One that is overdue may
  be in progress: it gets another `LATE_SECONDS`, and twice the longest time that one took so far. A script that calls
  `torch.save` may save its best model only, and a run that stops improving is healthy: nothing is derived from that.

Not covered: a process that was killed, and one whose threads are all blocked. It cannot report anything; use the
heartbeat of a `WebhookSink` for that. The pace of an earlier process of the same run is not used: machines differ.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.settings import check_types
from surefoot.errors import require
from surefoot.record.messages import CheckpointsExpected, Event, StepRow

if TYPE_CHECKING:
    from surefoot.types import Severity

STALLED, SLOW, NO_CHECKPOINT, LOADER_STALLED = (
    "progress.stalled",
    "progress.slow",
    "progress.no-checkpoint",
    "progress.loader-stalled",
)
"""The causes of the events."""
LONGEST_TICK_SECONDS = 5.0
QUIET_TIMES = 3.0
STRETCH_SECONDS = 10.0
STRETCH_STEPS = 8
EARLIER_STRETCHES, FEWEST_EARLIER = 64, 12
"""The maximum and minimum number of stretches that the present pace is compared with."""
LAST_STRETCHES = 8
ALL_STRETCHES = 1000
"""The number of stretches that are remembered, to know how much the pace varies."""
LATE_SECONDS = 600.0
"""How long an overdue checkpoint may still take: it may be in progress, and large."""
FIRST_STRETCHES = 2
"""The number of first stretches that are ignored: they compile, warm up and fill caches."""


@dataclass(frozen=True)
class ProgressAlarms:
    """When the run log reports that a run does not progress as before. `RunLog(folder, progress=ProgressAlarms(...))`.

    >>> ProgressAlarms(stalled_minutes=60).slower_times
    1.5
    """

    stalled_minutes: float | None = 15.0
    """Report when nothing has happened for this long: no step, no batch, no checkpoint. `None`: never."""
    slower_times: float | None = 1.5
    """Report steps that take this many times as long as earlier in the run. `None`: never."""
    late_times: float | None = 2.0
    """Report a checkpoint that is not written after this many of its intervals. `None`: never."""
    loader_seconds: float | None = 60.0
    """Report a wait for a data loader's batch that takes this long. `None`: never."""

    def __post_init__(self) -> None:
        check_types(self)
        for name, lowest in (
            ("stalled_minutes", 0.0),
            ("slower_times", 1.0),
            ("late_times", 1.0),
            ("loader_seconds", 0.0),
        ):
            got = getattr(self, name)
            require(got is None or got > lowest, f"`{name}` must be above {lowest:g}, or None; got {got!r}.")


def is_progress_alarm(event: Event) -> bool:
    """Whether an event is one of this module's alarms; the event for the end of one is not."""
    return event.cause in (STALLED, SLOW, NO_CHECKPOINT, LOADER_STALLED) and event.severity != "info"


class AwakeClock:
    """Seconds in which this process ran: a late tick counts for little."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def tick(self) -> float:
        """Count the time since the last tick; returns all seconds so far."""
        now = time.monotonic()
        self.seconds += min(max(0.0, now - self._last), LONGEST_TICK_SECONDS)
        self._last = now
        return self.seconds


class StallAlarm:
    """Detects that a run that was making steps has stopped."""

    def __init__(self, after_seconds: float) -> None:
        self._after = after_seconds
        self._last_progress: float | None = None
        self._longest = 0.0
        self._report_at = 0.0
        self._reported = False

    def note_progress(self, now: float, step: int | None) -> list[Event]:
        """A sign of progress: a step, a batch or a checkpoint."""
        quiet = 0.0 if self._last_progress is None else now - self._last_progress
        self._last_progress, self._longest = now, max(self._longest, quiet)
        if not self._reported:
            return []
        self._reported = False
        return [_event(STALLED, step, f"the run continues after {_duration(quiet)}", "info", {"seconds": quiet})]

    def look(self, now: float, step: int | None) -> list[Event]:
        """The events to report now."""
        if self._last_progress is None or step is None:
            return []
        quiet = now - self._last_progress
        limit = max(self._after, QUIET_TIMES * self._longest)
        if quiet < (self._report_at if self._reported else limit):
            return []
        self._reported, self._report_at = True, 2 * quiet
        longest = (
            f"the longest pause before that was {_duration(self._longest)}" if self._longest >= 1 else "no pause before"
        )
        summary = (
            f"no step, no batch and no checkpoint for {_duration(quiet)} after step {step:,} ({longest}). "
            "`py-spy dump --pid` of the process shows where it is"
        )
        return [_event(STALLED, step, summary, "warning", {"seconds": quiet, "longest_before": self._longest})]


class StepPace:
    """Detects that steps take longer than earlier in one part of the run. Its size is fixed."""

    def __init__(self, slower_times: float) -> None:
        self._slower = slower_times
        self._leave_out = FIRST_STRETCHES
        self._began: StepRow | None = None
        self._earlier: list[float] = []
        """The stretches that the present pace is compared with."""
        self._all: deque[float] = deque(maxlen=ALL_STRETCHES)
        """The earlier paces of this run: a pace that always varies raises no alarm."""
        self._last: deque[float] = deque(maxlen=LAST_STRETCHES)
        self._usual: float | None = None
        """The pace before the reported slow one; `None` if none was reported."""

    def add(self, row: StepRow) -> list[Event]:
        """Add a step; returns the events to report."""
        began = self._began
        if began is None or row.step <= began.step or row.time < began.time:  # went back, or clock was set
            self._began = row
            return []
        steps, seconds = row.step - began.step, row.time - began.time  # rows may be missing, step numbers are not
        if seconds < STRETCH_SECONDS or steps < STRETCH_STEPS:
            return []
        each, self._began = seconds / steps, row
        if self._leave_out:
            self._leave_out -= 1
            return []
        if len(self._last) == LAST_STRETCHES:
            self._all.append(self._last[0])
            if len(self._earlier) < EARLIER_STRETCHES:
                self._earlier.append(self._last[0])
        self._last.append(each)
        enough = len(self._earlier) >= FEWEST_EARLIER and len(self._last) == LAST_STRETCHES
        return self._judge(row) if enough else []

    def _judge(self, row: StepRow) -> list[Event]:
        usual, ordered = median(self._earlier), sorted(self._last)
        now, quarter = median(ordered), len(ordered) // 4
        if self._usual is not None and now < math.sqrt(self._slower) * self._usual:
            before, self._usual = self._usual, None
            self._earlier = [before] * FEWEST_EARLIER
            self._last.clear()
            summary = f"a step takes {_seconds(now)} again, as before"
            return [_event(SLOW, row.step, summary, "info", {"seconds": now, "before": before}, row.part)]
        if ordered[-1 - quarter] < usual / self._slower:  # faster: from now on, compare with this pace
            self._earlier = list(self._last)
            return []
        nine_in_ten = sorted(self._all)[int(0.9 * (len(self._all) - 1))]
        if ordered[quarter] <= max(self._slower * usual, nine_in_ten):
            return []
        self._usual = usual if self._usual is None else self._usual
        self._earlier = [*self._last, *list(self._last)[: FEWEST_EARLIER - LAST_STRETCHES]]
        summary = (
            f"a step takes {_seconds(now)}, {now / usual:.2g} times as long as earlier in the run ({_seconds(usual)}), "
            f"in {LAST_STRETCHES - quarter} of the last {LAST_STRETCHES} stretches of at least {STRETCH_SECONDS:g} s. "
            "Check the device's clocks and memory, other processes, and the data loader"
        )
        evidence = {"seconds": now, "before": usual, "times": now / usual}
        return [_event(SLOW, row.step, summary, "warning", evidence, row.part)]


class CheckpointSchedule:
    """Detects that checkpoints of one part of the run are not written as often as they should be."""

    def __init__(self, expected: CheckpointsExpected, late_times: float, now: float) -> None:
        self._expected, self._late = expected, late_times
        self._steps, self._since = 0, now
        self._longest = 0.0
        """The longest time between two checkpoints: a large one takes long to write."""
        self._last_step: int | None = None
        self._late_since: float | None = None
        self._report_at: float | None = None

    def saved(self, event: Event, now: float) -> list[Event]:
        """A checkpoint was written."""
        seconds, steps, reported = now - self._since, self._steps, self._report_at is not None
        self._steps, self._since, self._last_step = 0, now, event.step
        self._late_since = self._report_at = None
        if not reported:
            self._longest = max(self._longest, seconds)
            return []
        summary = f"a checkpoint is written again, after {steps:,} steps and {_duration(seconds)}"
        return [_event(NO_CHECKPOINT, event.step, summary, "info", {"steps": steps, "seconds": seconds}, event.part)]

    def look(self, row: StepRow, now: float) -> list[Event]:
        """A step was made; returns the events to report."""
        self._steps += 1
        due = self._overdue(now)
        if not due:
            return []
        self._late_since = now if self._late_since is None else self._late_since
        if now < (self._late_since + LATE_SECONDS if self._report_at is None else self._report_at):
            return []
        self._report_at = now + (now - self._since)
        last = f"the last one is of step {self._last_step:,}" if self._last_step is not None else "there is none yet"
        quiet = _duration(now - self._since)
        summary = (
            f"no checkpoint for {self._steps:,} steps and {quiet}; one is due {due}, and {last}. "
            "Check the disk that checkpoints are written to: a crash now would lose everything since"
        )
        evidence = {"steps": self._steps, "seconds": now - self._since, "last_step": self._last_step}
        return [_event(NO_CHECKPOINT, row.step, summary, "warning", evidence, row.part)]

    def _overdue(self, now: float) -> str:
        """The interval that has passed several times; an empty string if none has."""
        every, minutes = self._expected.every_steps, self._expected.every_minutes
        if now - self._since <= self._late * self._longest:
            return ""
        if every is not None and self._steps > self._late * every:
            return f"every {every:,} steps"
        if minutes is not None and now - self._since > self._late * 60 * minutes:
            return f"every {minutes:g} minutes"
        return ""


class RunProgress:
    """Follows a run for a log. Used only by the log's thread."""

    def __init__(self, settings: ProgressAlarms) -> None:
        self._settings = settings
        self._clock = AwakeClock()
        self._stall = None if settings.stalled_minutes is None else StallAlarm(60 * settings.stalled_minutes)
        self._paces: dict[str, StepPace] = {}
        self._schedules: dict[str, CheckpointSchedule] = {}
        self._step: int | None = None

    def tick(self) -> float:
        """Count time; returns all seconds so far in which this process ran."""
        return self._clock.tick()

    def expect(self, part: str, expected: CheckpointsExpected) -> None:
        """Checkpoints should be written at these intervals."""
        if self._settings.late_times is not None:
            self._schedules[part] = CheckpointSchedule(expected, self._settings.late_times, self._clock.seconds)

    def take(self, steps: Sequence[StepRow], events: Sequence[Event], drew: bool = False) -> list[Event]:
        """The events to report after these rows and events. `drew`: batches were drawn since the last call."""
        now, found = self._clock.tick(), list[Event]()
        self._step = steps[-1].step if steps else self._step
        for event in events:
            if event.event == "checkpoint" and event.part in self._schedules:
                found += self._schedules[event.part].saved(event, now)
        for row in steps:
            found += self._step_made(row, now)
        if self._stall is not None:
            alive = bool(steps) or drew or any(event.event in ("checkpoint", "resume", "rollback") for event in events)
            found += self._stall.note_progress(now, self._step) if alive else self._stall.look(now, self._step)
        return found

    def _step_made(self, row: StepRow, now: float) -> list[Event]:
        found = self._schedules[row.part].look(row, now) if row.part in self._schedules else []
        if self._settings.slower_times is not None:
            pace = self._paces.get(row.part)
            if pace is None and len(self._paces) < 16:
                pace = self._paces[row.part] = StepPace(self._settings.slower_times)
            found += pace.add(row) if pace is not None else []
        return found


def _event(
    cause: str,
    step: int | None,
    summary: str,
    severity: Severity,
    evidence: Mapping[str, float | int | None],
    part: str = "",
) -> Event:
    return Event("alarm", step, summary, time.time(), severity, cause, part=part, evidence=evidence)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _duration(seconds: float) -> str:
    """A duration for people.

    >>> _duration(75), _duration(720), _duration(9000)
    ('75 s', '12 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.2g} h"
