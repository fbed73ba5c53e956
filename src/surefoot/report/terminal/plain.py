"""A run as plain lines, for logs on a cluster, for notebooks and for pipes: no colours, nothing rewritten.

Each line is complete: date, time, step. The interval between progress lines grows with the run: `every_seconds`, then a
fiftieth of the elapsed time, at most ten minutes; a month is about 4,500 lines. Events are printed immediately, but
each kind is limited to a few lines per minute, so that they do not fill the disk; the next line counts the omitted
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from surefoot.report.terminal.formatting import as_ascii, clock, duration, number, one_line, pace, rate

if TYPE_CHECKING:
    from surefoot.record.messages import Event
    from surefoot.report.run_view import PartView, RunView

LONGEST_SECONDS = 600.0
EVENTS_A_MINUTE = 3
"""Lines for each kind of event."""
_GROWTH = 50
_STALL_SECONDS = 120.0
_LONGEST_SUMMARY = 300
_DATE = "%Y-%m-%d %H:%M:%S"


@dataclass
class PlainLines:
    """Decides which lines to print, given the view and the new events."""

    every_seconds: float = 10.0
    ascii_only: bool = False
    _began: float | None = None
    _next_line: float = 0.0
    _next_stall: float = _STALL_SECONDS
    _minute: int = -1
    _events_this_minute: dict[str, int] = field(default_factory=dict)
    _left_out_count: int = 0
    _printed_step: int | None = None

    def lines(self, view: RunView, events: Sequence[Event], now: float) -> list[str]:
        """The lines to print now, without line ends: events, progress, and whether the run has stalled."""
        found = [*self._events(events, now), *self._progress(view, now), *self._stall(view, now)]
        return [as_ascii(line) for line in found] if self.ascii_only else found

    def last_line(self, view: RunView, now: float) -> list[str]:
        """How the run ended, unless nothing has happened since the last line."""
        if view.started is None or (view.step == self._printed_step and not view.over and not self._left_out_count):
            return []
        line = f"{_start(now)} {summary(view, now, at_end=True)}{self._left_out()}"
        return [as_ascii(line) if self.ascii_only else line]

    def _progress(self, view: RunView, now: float) -> list[str]:
        if view.step is None or now < self._next_line or view.step == self._printed_step:
            return []
        self._began = now if self._began is None else self._began
        self._next_line = now + min(LONGEST_SECONDS, max(self.every_seconds, (now - self._began) / _GROWTH))
        self._printed_step = view.step
        return [f"{_start(now)} {summary(view, now)}{self._left_out()}"]

    def _events(self, events: Iterable[Event], now: float) -> list[str]:
        if int(now // 60) != self._minute:
            self._minute = int(now // 60)
            self._events_this_minute.clear()
        lines = []
        for event in events:
            count = self._events_this_minute[event.event] = self._events_this_minute.get(event.event, 0) + 1
            if count <= EVENTS_A_MINUTE:
                lines.append(_event_line(event))
            else:
                self._left_out_count += 1
        return lines

    def _left_out(self) -> str:
        left_out, self._left_out_count = self._left_out_count, 0
        return f" · {left_out:,} more events not listed" if left_out else ""

    def _stall(self, view: RunView, now: float) -> list[str]:
        quiet = view.quiet_for(now)
        if quiet is None or not view.is_stalled(now, _STALL_SECONDS):
            self._next_stall = _STALL_SECONDS
            return []
        if quiet < self._next_stall:
            return []
        self._next_stall = 2 * quiet
        return [f"{_start(now)} no new step for {duration(quiet)}, the last was {_step(view.step)}"]


def summary(view: RunView, now: float, at_end: bool = False) -> str:
    """The main numbers on one line."""
    counted = view.total_steps and view.step is not None
    items = [f"steps {view.step + 1:,}/{view.total_steps:,}" if counted else _step(view.step)]  # type: ignore[operator]
    several = len(view.parts) > 1
    items += [_part(one_line(name) or "main" if several else "", part) for name, part in view.parts.items()]
    items += [pace(view.steps_per_second)] if view.steps_per_second is not None else []
    items += [f"clipped {100 * view.clip_share:.0f}%"] if view.clip_share is not None else []
    items += [f"{name} {count:,}" for name, count in view.tallies.items() if count]
    items.append(f"{duration(view.elapsed(now))} elapsed")
    items += [f"{duration(view.seconds_left)} left"] if view.seconds_left is not None and not at_end else []
    return " · ".join([*items, *([view.state] if view.over else [])])


def _part(name: str, part: PartView) -> str:
    items = [f"{name} loss {number(part.loss)}".strip()]
    if part.smoothed is not None and number(part.smoothed) != number(part.loss):
        items.append(f"({number(part.smoothed)} smoothed)")
    items += [f"grad {number(part.grad_norm, 3)}"] if part.grad_norm is not None else []
    items += [f"lr {rate(part.lr)}"] if part.lr is not None else []
    items += [f"scale {number(part.loss_scale)}"] if part.loss_scale not in (None, 1.0) else []
    return " ".join(items)


def _event_line(event: Event) -> str:
    words = one_line(str(event.summary)[:_LONGEST_SUMMARY])
    items = [_step(event.step)] if event.step is not None else []
    items += [event.severity] if event.severity != "info" else []
    items += [f"{event.event} {one_line(event.part)}".strip(), words]
    return f"{_start(event.time)} {' · '.join(items)}"


def _start(time: float) -> str:
    return f"surefoot {clock(time, _DATE)}"


def _step(step: int | None) -> str:
    return "no step yet" if step is None else f"step {step:,}"
