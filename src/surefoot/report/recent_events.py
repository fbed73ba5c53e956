"""Recent events of a run for the terminal: counts of problems, and the last few events.

The size is fixed: only `MOST_EVENTS` groups are kept, and consecutive events of one kind share a group.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from surefoot.report.terminal.formatting import one_line

if TYPE_CHECKING:
    from surefoot.record.messages import Event

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
