"""The content of a message about a whole run: its progress, its loss, its events, and its end.

It processes the batches of the run log; its size does not grow with the run. Used for the heartbeats of a `WebhookSink`
and for the message at the end of a run.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, TypedDict

from surefoot.core.sparkline import SparkCurve, sparkline
from surefoot.core.wording import count_of
from surefoot.record.messages import SINK_DROPPED, Batch, Event, StepRow
from surefoot.record.progress_alarms import STALLED
from surefoot.record.run_folder import report_command
from surefoot.record.sinks.loss_picture import draw_loss

if TYPE_CHECKING:
    from pathlib import Path


_CURVE_CHARACTERS = 40
_COUNTED = ("skip", "overflow", "spike", "rollback", "alarm", "halt")


class SummaryFields(TypedDict):
    """The state of a run for programs."""

    step: int | None
    steps: int
    """Steps of this process, including repeated ones."""
    seconds: float | None
    """From the first to the last step."""
    loss: float | None
    """The last finite loss."""
    nonfinite_since: int | None
    """The step since which the loss is NaN or infinite; None if the last loss is finite."""
    first_loss: float | None
    lowest_loss: float | None
    checkpoint_step: int | None
    """The step of the last checkpoint."""
    events: dict[str, int]
    """The number of events of each kind, except for severity `info`."""
    dropped: int
    """Rows and events that did not reach the run log or a sink."""


class MessageFacts:
    """Follows a run. Only `add` changes it."""

    def __init__(self) -> None:
        self.ended: Event | None = None
        """The `end` or `halt` of the run."""
        self.folder: Path | None = None
        """The folder of the run, if it is known."""
        self.stalled = False
        """Whether the run was reported as stalled, and has made no step since."""
        self._step: int | None = None
        self._steps = 0
        self._began: float | None = None
        self._latest: float | None = None
        self._part: str | None = None
        self._loss: float | None = None
        self._nonfinite: tuple[int, float] | None = None  # the step since which the loss is not finite, and the loss
        self._first_loss: float | None = None
        self._lowest_loss: float | None = None
        self._checkpoint_step: int | None = None
        self._events: Counter[str] = Counter()
        self._dropped = 0
        self._curve = SparkCurve()

    def add(self, batch: Batch) -> None:
        """Add what has happened since."""
        for row in batch.steps:
            self._add_row(row)
        for event in batch.events:
            self._add_event(event)

    def _add_row(self, row: StepRow) -> None:
        self._part = row.part if self._part is None else self._part
        self.stalled = False
        if row.part != self._part:  # the optimizer that stepped first represents the run
            return
        self._step, self._steps = row.step, self._steps + 1
        self._began = row.time if self._began is None else self._began
        self._latest = row.time
        if row.loss is None:
            return
        self._curve.add(row.step, row.loss)
        if row.skipped:
            return
        if not math.isfinite(row.loss):
            self._nonfinite = self._nonfinite or (row.step, row.loss)
        else:
            self._loss, self._nonfinite = row.loss, None
            self._first_loss = row.loss if self._first_loss is None else self._first_loss
            self._lowest_loss = row.loss if self._lowest_loss is None else min(self._lowest_loss, row.loss)

    def _add_event(self, event: Event) -> None:
        if event.event in ("end", "halt"):
            self.ended = event
        elif event.event == "checkpoint":
            self._checkpoint_step = event.step
        elif event.event == "drops" or event.cause == SINK_DROPPED:
            dropped = event.evidence.get("dropped")
            self._dropped += dropped if isinstance(dropped, int) else 1
        if event.cause == STALLED and event.severity != "info":
            self.stalled = True
        if event.event in _COUNTED and event.severity != "info":
            self._events[event.event] += 1

    def fields(self) -> SummaryFields:
        """The current state."""
        known = self._began is not None and self._latest is not None
        return {
            "step": self._step,
            "steps": self._steps,
            "seconds": round(self._latest - self._began, 3) if known else None,  # type: ignore[operator]
            "loss": self._loss,
            "nonfinite_since": None if self._nonfinite is None else self._nonfinite[0],
            "first_loss": self._first_loss,
            "lowest_loss": self._lowest_loss,
            "checkpoint_step": self._checkpoint_step,
            "events": dict(self._events),
            "dropped": self._dropped,
        }

    def sentence(self) -> str:
        """The state as a sentence."""
        if self._step is None:
            return "no step yet"
        words = [f"step {self._step:,}"]
        if self._nonfinite is not None:
            step, loss = self._nonfinite
            words.append(f"loss {loss:g} since step {step:,}")
        if self._loss is not None and self._first_loss is not None:
            last = "last finite loss" if self._nonfinite is not None else "loss"
            words.append(f"{last} {self._loss:.4g} (at first {self._first_loss:.4g}, lowest {self._lowest_loss:.4g})")
        words += [count_of(count, name) for name, count in self._events.items()]
        if self._checkpoint_step is not None:
            words.append(f"last checkpoint at step {self._checkpoint_step:,}")
        if self._dropped:
            words.append(f"{self._dropped:,} rows or messages were dropped")
        return "; ".join(words)

    @property
    def command(self) -> str:
        """The command that shows the run; empty if its folder is not known."""
        return "" if self.folder is None else report_command(self.folder)

    def curve(self) -> str:
        """The loss as a line of characters."""
        return sparkline(self._curve.slots(_CURVE_CHARACTERS))

    def picture(self) -> bytes | None:
        """The loss as a PNG image; `None` while there is none to draw."""
        return None if self._step is None else draw_loss(self._curve, self._step)
