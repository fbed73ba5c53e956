"""The current state of a run, from the rows and events received so far.

`ProgressSink` in the training process, or `surefoot watch` in another one, adds rows and events to a `RunView`. It
draws nothing and reads no clock; other functions turn it into lines. Its size does not grow with the run: curves have a
fixed number of slots, windows a fixed length, and the number of parts and events is limited.

A row may contain anything: `None`, NaN, Inf, 1e300, a step lower than the last one (after a resume or rollback), a time
that does not advance. None of these raises or affects later rows.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Literal

from surefoot.core.sparkline import SparkCurve
from surefoot.report.terminal.formatting import one_line

if TYPE_CHECKING:
    from surefoot.record.messages import Batch, Event, StepRow


MOST_PARTS = 8
_STALLED_STEPS = 5

State = Literal["waiting", "running", "ended", "halted"]


SMOOTHED_OVER = 31
"""The smoothed loss is the median of this many: unlike an average, it is not moved by one spike."""
PACE_SECONDS = 10.0
_PACE_GAP = 0.2
_PACE_LEAST = 2.0


MOST_EVENTS = 8
_LONGEST_SUMMARY = 400
_COUNTED = {"skip": "skips", "overflow": "skips", "rollback": "rollbacks"}
_ALARMS = {"alarm", "spike", "clip-burst", "skip", "rollback", "halt"}
_SKIPPED_AFTER_ALARM = "skip"
"""The cause of a step that `--guard` skipped: its alarm is another event."""


def is_alarm(event: Event) -> bool:
    """Whether an event counts as an alarm: what `summary()`, the page and the terminal count."""
    return event.event in _ALARMS and event.severity != "info" and event.cause != _SKIPPED_AFTER_ALARM


@dataclass
class EventGroup:
    """An event, or several consecutive ones of the same kind."""

    event: str
    step: int | None
    """The step of the latest event."""
    summary: str
    time: float
    severity: str
    part: str
    cause: str
    times: int = 1

    def is_like(self, other: EventGroup) -> bool:
        """Whether both can be shown on one line."""
        return (self.event, self.part, self.cause) == (other.event, other.part, other.cause)


@dataclass
class RecentEvents:
    """Counts over all events, and the latest of them in groups."""

    groups: deque[EventGroup] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("skips", "rollbacks", "alarms", "drops"), 0))
    seen: int = 0
    """How many events were added, including those that are no longer kept."""

    def add(self, event: Event) -> None:
        """Count an event and keep it."""
        self.seen += 1
        self._count(event)
        group = EventGroup(
            event="incident" if event.cause == "incident" else event.event,  # a captured step is no alarm
            step=event.step,
            summary=one_line(str(event.summary)[:_LONGEST_SUMMARY]),
            time=event.time,
            severity=event.severity,
            part=event.part,
            cause=event.cause,
        )
        if self.groups and self.groups[-1].is_like(group):
            group.times += self.groups.pop().times
        self.groups.append(group)

    def latest(self, count: int) -> list[EventGroup]:
        """The last groups, newest last."""
        return list(islice(self.groups, max(0, len(self.groups) - count), None))

    def _count(self, event: Event) -> None:
        self.counts["alarms"] += is_alarm(event)
        if event.event in _COUNTED:
            self.counts[_COUNTED[event.event]] += 1
        elif event.event == "drops":
            dropped = event.evidence.get("dropped")
            self.counts["drops"] += dropped if isinstance(dropped, int) else 1


class Pace:
    """Steps per second over the last seconds, from the times in the rows, so batching of rows has no effect."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=int(PACE_SECONDS / _PACE_GAP) + 2)

    def add(self, time: float, step: int) -> None:
        """Record the time of a step."""
        if not math.isfinite(time):
            return
        if self._marks and (step <= self._marks[-1][1] or time < self._marks[-1][0]):
            self._marks.clear()  # resumed, rolled back, or the clock was changed: earlier times are not comparable
        if len(self._marks) >= 2 and time - self._marks[-2][0] < _PACE_GAP:
            self._marks[-1] = (time, step)
        else:
            self._marks.append((time, step))
        # The second condition keeps enough rows; the first alone would let one long pause count for a long time.
        while (
            len(self._marks) > 2 and time - self._marks[0][0] > PACE_SECONDS and time - self._marks[1][0] > _PACE_LEAST
        ):
            self._marks.popleft()

    def reset(self) -> None:
        """Start over after a pause."""
        self._marks.clear()

    @property
    def steps_per_second(self) -> float | None:
        """`None` until two steps were taken at different times."""
        if len(self._marks) < 2:
            return None
        (first_time, first), (last_time, last) = self._marks[0], self._marks[-1]
        return (last - first) / (last_time - first_time) if last_time > first_time else None


class PartView:
    """One optimizer of the run: its last numbers, its loss curve, its pace."""

    def __init__(self) -> None:
        self.step = 0
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self.lr: float | None = None
        self.loss_scale: float | None = None
        self.skips = 0
        self.curve = SparkCurve()
        self.pace = Pace()
        self._recent: deque[float] = deque(maxlen=SMOOTHED_OVER)
        self._clips_possible = 0
        self._clips = 0

    def add(self, row: StepRow) -> None:
        """Add a step. Values that it does not have stay as they were."""
        self.step = row.step
        self.pace.add(row.time, row.step)
        self.skips += row.skipped
        if row.loss is not None:
            self.loss = row.loss
            self.curve.add(row.step, row.loss)
            if math.isfinite(row.loss):
                self._recent.append(row.loss)
        if row.clip_factor is not None:
            self._clips_possible += 1
            self._clips += row.clip_factor < 1
        self.grad_norm = self.grad_norm if row.grad_norm is None else row.grad_norm
        self.lr = self.lr if row.lr is None else row.lr
        self.loss_scale = self.loss_scale if row.loss_scale is None else row.loss_scale

    @property
    def smoothed(self) -> float | None:
        """The median of the last finite losses."""
        return median(self._recent) if self._recent else None

    @property
    def clip_share(self) -> float | None:
        """The share of steps whose gradient was clipped; `None` if nothing clips."""
        return self._clips / self._clips_possible if self._clips_possible else None


@dataclass
class RunView:
    """The current state of a run. Only `add` changes it."""

    total_steps: int | None = None
    """How many steps are planned, if known; used for the remaining time."""
    parts: dict[str, PartView] = field(default_factory=dict)
    parts_left_out: bool = False
    state: State = "waiting"
    started: float | None = None
    """The time of the first row or event; after a resume, of the first one of the new process."""
    last_time: float | None = None
    last_step_time: float | None = None
    events: RecentEvents = field(default_factory=RecentEvents)
    _ended_at: float | None = None

    def add(self, batch: Batch) -> None:
        """Add new rows and events, in the order of their times."""
        rows = iter(batch.steps)
        row = next(rows, None)
        for event in batch.events:
            while row is not None and not row.time > event.time:
                self.add_row(row)
                row = next(rows, None)
            self.add_event(event)
        while row is not None:
            self.add_row(row)
            row = next(rows, None)

    def add_row(self, row: StepRow) -> None:
        """Add a step."""
        self._note_time(row.time)
        self.last_step_time = self.last_time
        if (
            self._ended_at is None or row.time > self._ended_at
        ):  # rows are read separately from events, and may arrive late
            self.state, self._ended_at = "running", None
        part = self.parts.get(row.part)
        if part is None:
            if len(self.parts) >= MOST_PARTS:
                self.parts_left_out = True
                return
            part = self.parts[row.part] = PartView()
        part.add(row)

    def add_event(self, event: Event) -> None:
        """Add an event."""
        self._note_time(event.time)
        if event.event in ("start", "resume"):
            self._begin(event)
        elif event.event == "end" and self.state != "halted":
            self.state, self._ended_at = "ended", event.time
        elif event.event == "halt":
            self.state, self._ended_at = "halted", event.time
        self.events.add(event)

    @property
    def lead(self) -> PartView | None:
        """The part that represents the run: the first one."""
        return next(iter(self.parts.values()), None)

    @property
    def step(self) -> int | None:
        """The last step of the part with the highest step."""
        return max((part.step for part in self.parts.values()), default=None)

    @property
    def tallies(self) -> dict[str, int]:
        """Counts of problems so far. Skips are counted from rows or from events, whichever are more."""
        counts = self.events.counts
        return {
            "skips": max(counts["skips"], sum(part.skips for part in self.parts.values())),
            "rollbacks": counts["rollbacks"],
            "alarms": counts["alarms"],
            "rows dropped": counts["drops"],
        }

    @property
    def clip_share(self) -> float | None:
        """The share of steps that were clipped, in the part where it is largest; `None` if nothing clips."""
        shares = (part.clip_share for part in self.parts.values())
        return max((share for share in shares if share is not None), default=None)

    @property
    def steps_per_second(self) -> float | None:
        """The pace of the part that represents the run."""
        return self.lead.pace.steps_per_second if self.lead else None

    @property
    def seconds_left(self) -> float | None:
        """At the current pace; `None` if the pace or the number of planned steps is not known."""
        pace = self.steps_per_second
        if not pace or self.total_steps is None or self.step is None or self.state != "running":
            return None
        return max(0, self.total_steps - self.step - 1) / pace

    def elapsed(self, now: float) -> float | None:
        """Seconds since the run began; for a run that has ended, until its last row."""
        if self.started is None:
            return None
        until = self.last_time if self.over else now
        return max(0.0, (until or now) - self.started)

    def quiet_for(self, now: float) -> float | None:
        """Seconds without a new step; `None` if the run is over or has not begun."""
        since = self.started if self.last_step_time is None else max(self.last_step_time, self.started or 0.0)
        return None if since is None or self.over else max(0.0, now - since)

    def is_stalled(self, now: float, after_seconds: float = 30.0) -> bool:
        """Whether the next step takes much longer than recent steps."""
        quiet, pace = self.quiet_for(now), self.steps_per_second
        return quiet is not None and quiet > max(after_seconds, _STALLED_STEPS / pace if pace else 0.0)

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.state in ("ended", "halted")

    def _note_time(self, time: float) -> None:
        if not math.isfinite(time):
            return
        self.started = time if self.started is None else self.started
        self.last_time = time if self.last_time is None else max(time, self.last_time)

    def _begin(self, event: Event) -> None:
        self.state, self._ended_at = "running", None
        self.started = event.time if math.isfinite(event.time) else self.started
        for part in self.parts.values():
            part.pace.reset()
        planned = event.evidence.get("total_steps")
        if isinstance(planned, int) and not isinstance(planned, bool) and planned > 0:
            self.total_steps = planned
