"""The bounded queue between the run log and the thread of one sink.

`put` never waits. When the queue is full, the oldest rows are dropped and counted, but their events stay: an alarm is
more important than one more point of a curve.
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
        """The number of rows and events that the sink never received, or could not process."""
        self.closing = False
        """No more batches are accepted; waiting ones are still delivered."""
        self.given_up = False
        """No more batches are accepted, and waiting ones were dropped."""
        self._capacity = capacity
        self._batches: deque[Batch] = deque()
        self._busy_since: float | None = None

    def put(self, batch: Batch) -> bool:
        """Append a batch; returns whether the queue was full, so that older rows were dropped."""
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
        """The next batch, or `None` if none arrived in time; and whether the queue has ended."""
        with self.changed:
            self.changed.wait_for(lambda: self._batches or self.closing or self.given_up, timeout)
            if self._batches:
                self._busy_since = time.monotonic()
                return self._batches.popleft(), False
            return None, self.closing or self.given_up

    def delivered(self, lost: int = 0) -> None:
        """The batch that was taken is complete; `lost` of its rows and events could not be delivered."""
        with self.changed:
            self.dropped += lost
            self._busy_since = None
            self.changed.notify_all()

    def close(self) -> None:
        """Accept no more batches."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def give_up(self) -> None:
        """Accept no more batches, and drop those that wait."""
        with self.changed:
            self.given_up = True
            self.dropped += sum(map(size_of, self._batches))
            self._batches.clear()
            self.changed.notify_all()

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until everything was delivered, `timeout` seconds at most; returns whether it was."""
        with self.changed:
            idle = self.changed.wait_for(lambda: self.given_up or self._is_idle(), timeout)
        return idle and not self.given_up

    def pause(self, seconds: float) -> None:
        """Wait for this time, or until the queue is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing, seconds)

    @property
    def waiting(self) -> int:
        """Rows and events that wait."""
        return sum(map(size_of, tuple(self._batches)))

    @property
    def busy_seconds(self) -> float | None:
        """The time since the delivery of the last batch began; `None` if it is delivered."""
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
    """The number of rows and events in a batch."""
    return sum(map(len, (batch.steps, batch.layers, batch.histograms, batch.devices, batch.events)))
