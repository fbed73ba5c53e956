"""What there is to say about a run at this moment, from the rows and events it has sent so far.

`RunView` is fed by whoever has them: `ProgressSink` in the training process, `surefoot watch` in another one. It
draws nothing and reads no clock; functions elsewhere turn it into lines. Its size does not grow with the run: curves
have a fixed number of slots, windows a fixed length, and only so many parts and events are kept by name.

A row may say anything: `None`, NaN, Inf, 1e300, a step that is lower than the last one (the run was resumed, or rolled
back), a time that stands still. None of it raises, and none of it spoils what comes after.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Literal

from surefoot.report.terminal.formatting import one_line
from surefoot.report.terminal.sparkline import SparkCurve

if TYPE_CHECKING:
    from surefoot.record.messages import Batch, Event, StepRow

MOST_PARTS = 8
MOST_EVENTS = 8
SMOOTHED_OVER = 31
"""The smoothed loss is the median of so many: one spike does not move it, as it would an average."""
PACE_SECONDS = 10.0
_PACE_GAP = 0.2
_PACE_LEAST = 2.0
_STALLED_STEPS = 5
_LONGEST_SUMMARY = 400
_COUNTED = {"skip": "skips", "overflow": "skips", "rollback": "rollbacks"}
_ALARMS = {"alarm", "spike", "clip-burst"}
"""Alarms from `warning` on; below that they are remarks. What is called an alarm always is one."""

State = Literal["waiting", "running", "ended", "halted"]


class Pace:
    """Steps per second over the last seconds, by the rows' own times: batches that arrive together do not matter."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=int(PACE_SECONDS / _PACE_GAP) + 2)

    def add(self, time: float, step: int) -> None:
        """Note when a step was taken."""
        if not math.isfinite(time):
            return
        if self._marks and (step <= self._marks[-1][1] or time < self._marks[-1][0]):
            self._marks.clear()  # resumed, rolled back, or the clock was set: what came before is another story
        if len(self._marks) >= 2 and time - self._marks[-2][0] < _PACE_GAP:
            self._marks[-1] = (time, step)
        else:
            self._marks.append((time, step))
        # The second condition keeps enough to go by; the first alone would let one long pause count for long after.
        while (
            len(self._marks) > 2 and time - self._marks[0][0] > PACE_SECONDS and time - self._marks[1][0] > _PACE_LEAST
        ):
            self._marks.popleft()

    def forget(self) -> None:
        """Start over: time has passed in which nothing ran."""
        self._marks.clear()

    @property
    def steps_per_second(self) -> float | None:
        """`None` until two steps were taken at different times."""
        if len(self._marks) < 2:
            return None
        (first_time, first), (last_time, last) = self._marks[0], self._marks[-1]
        return (last - first) / (last_time - first_time) if last_time > first_time else None


class PartView:
    """One optimizer of the run."""

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
        """Take a step in. What it does not say stays as it was."""
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
class Happening:
    """An event, or several of the same kind in a row."""

    event: str
    step: int | None
    """Of the latest."""
    summary: str
    time: float
    severity: str
    part: str
    cause: str
    times: int = 1

    def is_like(self, other: Happening) -> bool:
        """Whether both are of one kind, so that one line can tell of them."""
        return (self.event, self.part, self.cause) == (other.event, other.part, other.cause)


@dataclass
class RunView:
    """A run as it stands. Feed it with `add`; nothing else changes it."""

    total_steps: int | None = None
    """How many steps are planned, if anybody said so: the remaining time follows from it."""
    parts: dict[str, PartView] = field(default_factory=dict)
    parts_left_out: bool = False
    state: State = "waiting"
    started: float | None = None
    """When the first row or event was made; after a resume, the first one of the new process."""
    last_time: float | None = None
    last_step_time: float | None = None
    events: deque[Happening] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    events_seen: int = 0
    _ended_at: float | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("skips", "rollbacks", "alarms", "drops"), 0))

    def add(self, batch: Batch) -> None:
        """Take in what has happened since, rows and events in the order of their times."""
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
        """Take a step in."""
        self._note_time(row.time)
        self.last_step_time = self.last_time
        if self._ended_at is None or row.time > self._ended_at:  # rows are read apart from events, and may come late
            self.state, self._ended_at = "running", None
        part = self.parts.get(row.part)
        if part is None:
            if len(self.parts) >= MOST_PARTS:
                self.parts_left_out = True
                return
            part = self.parts[row.part] = PartView()
        part.add(row)

    def add_event(self, event: Event) -> None:
        """Take an event in."""
        self.events_seen += 1
        self._note_time(event.time)
        if event.event in ("start", "resume"):
            self._begin(event)
        elif event.event == "end" and self.state != "halted":
            self.state, self._ended_at = "ended", event.time
        elif event.event == "halt":
            self.state, self._ended_at = "halted", event.time
        self._count(event)
        self._keep(event)

    @property
    def lead(self) -> PartView | None:
        """The part that stands for the run: the one that was seen first."""
        return next(iter(self.parts.values()), None)

    @property
    def step(self) -> int | None:
        """The last step of the part that is furthest."""
        return max((part.step for part in self.parts.values()), default=None)

    @property
    def skips(self) -> int:
        """Steps that were not applied, by the rows or by the events, whichever tell of more."""
        return max(self.counts["skips"], sum(part.skips for part in self.parts.values()))

    @property
    def tallies(self) -> dict[str, int]:
        """What has gone wrong so far, and how often."""
        alarms, drops = self.counts["alarms"], self.counts["drops"]
        return {"skips": self.skips, "rollbacks": self.counts["rollbacks"], "alarms": alarms, "rows dropped": drops}

    @property
    def clip_share(self) -> float | None:
        """The share of steps that were clipped, in the part where it is largest; `None` if nothing clips."""
        shares = (part.clip_share for part in self.parts.values())
        return max((share for share in shares if share is not None), default=None)

    @property
    def steps_per_second(self) -> float | None:
        """The pace of the part that stands for the run."""
        return self.lead.pace.steps_per_second if self.lead else None

    @property
    def seconds_left(self) -> float | None:
        """At the present pace; `None` if the pace or the number of planned steps is not known."""
        pace = self.steps_per_second
        if not pace or self.total_steps is None or self.step is None or self.state != "running":
            return None
        return max(0, self.total_steps - self.step - 1) / pace

    def elapsed(self, now: float) -> float | None:
        """Seconds since the run began; a run that is over stands still."""
        if self.started is None:
            return None
        until = self.last_time if self.over else now
        return max(0.0, (until or now) - self.started)

    def quiet_for(self, now: float) -> float | None:
        """Seconds without a new step; `None` if the run is over or has not begun."""
        since = self.started if self.last_step_time is None else max(self.last_step_time, self.started or 0.0)
        return None if since is None or self.over else max(0.0, now - since)

    def is_stalled(self, now: float, after_seconds: float = 30.0) -> bool:
        """Whether the next step takes far longer than steps have been taking."""
        quiet, pace = self.quiet_for(now), self.steps_per_second
        return quiet is not None and quiet > max(after_seconds, _STALLED_STEPS / pace if pace else 0.0)

    @property
    def over(self) -> bool:
        """Whether the run has said that it ended."""
        return self.state in ("ended", "halted")

    def latest(self, count: int) -> list[Happening]:
        """The last events, newest last."""
        return list(islice(self.events, max(0, len(self.events) - count), None))

    def _note_time(self, time: float) -> None:
        if not math.isfinite(time):
            return
        self.started = time if self.started is None else self.started
        self.last_time = time if self.last_time is None else max(time, self.last_time)

    def _begin(self, event: Event) -> None:
        self.state, self._ended_at = "running", None
        self.started = event.time if math.isfinite(event.time) else self.started
        for part in self.parts.values():
            part.pace.forget()
        planned = event.evidence.get("total_steps")
        if isinstance(planned, int) and not isinstance(planned, bool) and planned > 0:
            self.total_steps = planned

    def _count(self, event: Event) -> None:
        if event.event in _COUNTED:
            self.counts[_COUNTED[event.event]] += 1
        elif event.event in _ALARMS and event.severity != "info":
            self.counts["alarms"] += 1
        elif event.event == "drops":
            dropped = event.evidence.get("dropped")
            self.counts["drops"] += dropped if isinstance(dropped, int) else 1

    def _keep(self, event: Event) -> None:
        kept = Happening(
            event=event.event,
            step=event.step,
            summary=one_line(str(event.summary)[:_LONGEST_SUMMARY]),
            time=event.time,
            severity=event.severity,
            part=event.part,
            cause=event.cause,
        )
        if self.events and self.events[-1].is_like(kept):
            kept.times += self.events.pop().times
        self.events.append(kept)
