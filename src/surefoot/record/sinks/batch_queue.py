"""The bounded queue between the run log and the thread of one sink.

`put` never waits. When the queue is full the oldest rows are dropped and counted, but their events stay: an alarm
matters more than one more point of a curve.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.record.messages import Batch, Event

MOST_EVENTS_HELD = 1000


class BatchQueue:
    """Batches that wait for a sink. Any thread may put; one thread takes and calls `delivered` after each batch."""

    def __init__(self, capacity: int) -> None:
        self.changed = threading.Condition()
        self.dropped = 0
        """How many rows and events the sink never got, or could not take."""
        self.closing = False
        """No more batches come; those that wait are still taken."""
        self.given_up = False
        """No more batches come, and those that waited were dropped."""
        self._capacity = capacity
        self._batches: deque[Batch] = deque()
        self._busy_since: float | None = None

    def put(self, batch: Batch) -> bool:
        """Append a batch; whether the queue was full, so that older rows were dropped."""
        with self.changed:
            if self.closing or self.given_up:
                self.dropped += size_of(batch)
                return False
            self._batches.append(batch)
            full = len(self._batches) > self._capacity
            if full:
                self._drop_oldest()
            self.changed.notify_all()
            return full

    def take(self, timeout: float | None) -> tuple[Batch | None, bool]:
        """The next batch, or `None` if none came in time; and whether nothing more will come."""
        with self.changed:
            self.changed.wait_for(lambda: self._batches or self.closing or self.given_up, timeout)
            if self._batches:
                self._busy_since = time.monotonic()
                return self._batches.popleft(), False
            return None, self.closing or self.given_up

    def delivered(self, lost: int = 0) -> None:
        """The batch that was taken is done with; `lost` of its rows and events could not be delivered."""
        with self.changed:
            self.dropped += lost
            self._busy_since = None
            self.changed.notify_all()

    def close(self) -> None:
        """Take no more batches in."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def give_up(self) -> None:
        """Take no more batches in, and drop those that wait."""
        with self.changed:
            self.given_up = True
            self.dropped += sum(map(size_of, self._batches))
            self._batches.clear()
            self.changed.notify_all()

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until everything was delivered, `timeout` seconds at most; whether it was."""
        with self.changed:
            idle = self.changed.wait_for(lambda: self.given_up or self._is_idle(), timeout)
        return idle and not self.given_up

    def pause(self, seconds: float) -> None:
        """Wait so long, or until the queue is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing, seconds)

    @property
    def waiting(self) -> int:
        """Rows and events that wait."""
        return sum(map(size_of, tuple(self._batches)))

    @property
    def busy_seconds(self) -> float | None:
        """How long the batch that was taken last has been in delivery; `None` if it is delivered."""
        since = self._busy_since
        return None if since is None else time.monotonic() - since

    def _drop_oldest(self) -> None:
        oldest, following = self._batches.popleft(), self._batches.popleft()
        events: tuple[Event, ...] = (*oldest.events, *following.events)
        self.dropped += size_of(oldest) - len(oldest.events) + max(0, len(events) - MOST_EVENTS_HELD)
        self._batches.appendleft(replace(following, events=events[-MOST_EVENTS_HELD:]))

    def _is_idle(self) -> bool:
        return not self._batches and self._busy_since is None


def size_of(batch: Batch) -> int:
    """How many rows and events a batch holds."""
    return sum(map(len, (batch.steps, batch.layers, batch.histograms, batch.devices, batch.events)))
