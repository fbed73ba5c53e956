"""The thread that writes the run log, and the queue that feeds it.

The training thread only appends to a bounded queue. This thread wakes a few times a second, looks how much is waiting,
and about twice a second turns all of it into record batches, appends them to the files and offers them to the sinks.
What does not fit into the queue is dropped and counted, and the count becomes an event.

Nothing here raises into training. When the disk fails, one warning says so; what comes meanwhile is dropped and
counted, and the writer tries again now and then.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from surefoot.record.messages import Batch, DeviceRow, Event, Histogram, LayerRows, StepRow
from surefoot.record.sinks.runner import SinkRunner, close_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from surefoot.record.messages import Sink
    from surefoot.record.store import Store

log = logging.getLogger("surefoot")

WAITING_LIMIT = 65536
"""How many messages may wait."""
TICK_SECONDS = 0.1
CYCLE_SECONDS = 0.5
RETRY_SECONDS = 10.0
SINK_SECONDS = 5.0
"""How long all sinks together may take to end."""


class Writer:
    """Owns the queue and the thread. Other threads touch `waiting`, `room`, `count_drop`, `flush` and `close` only."""

    def __init__(self, folder: Path, sinks: Sequence[Sink]) -> None:
        self.folder = folder
        self.waiting: deque[tuple[str, Any]] = deque()
        self.room = WAITING_LIMIT
        self.dropped = 0
        self._counting = threading.RLock()  # a signal handler may log as well, in the middle of counting
        self._process = os.getpid()
        self._runners = [SinkRunner(sink) for sink in sinks]  # here, so that what is no sink is refused at once
        self._store: Store | None = None
        self._trouble: BaseException | None = None
        self._retry_at = 0.0
        self._wake, self._ended = threading.Event(), threading.Event()
        self._flushes: deque[threading.Event] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="surefoot-run-log", daemon=True)
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether this is the process that owns the log, and not a fork of it."""
        return os.getpid() == self._process

    def count_drop(self, messages: int = 1) -> None:
        """Some messages are lost."""
        with self._counting:
            self.dropped += messages

    def flush(self, timeout: float) -> bool:
        """Wait until what was taken so far is on the disk; whether it is."""
        if not self.here or self._ended.is_set() or threading.current_thread() is self._thread:
            return False
        done = threading.Event()
        self._flushes.append(done)
        self._wake.set()
        return done.wait(timeout) and self._trouble is None

    def close(self, timeout: float) -> None:
        """Write what waits and end, within `timeout` seconds."""
        if not self.here or self._closing:
            return
        self._closing = True
        self.room = 0
        self._wake.set()
        if not self._ended.wait(timeout):
            log.warning(
                "The run log in %s was not finished within %g s: its last rows may be missing.", self.folder, timeout
            )

    def _run(self) -> None:
        due = 0.0
        while True:
            closing = self._closing
            if closing or self._flushes or len(self.waiting) > WAITING_LIMIT // 4 or time.monotonic() >= due:
                due = time.monotonic() + CYCLE_SECONDS
                self._cycle()
            if closing:
                break
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()
        self._end()

    def _cycle(self) -> None:
        flushes = [self._flushes.popleft() for _ in range(len(self._flushes))]
        batch = self._drain()
        if batch is not None:
            self._write(batch)
            for runner in self._runners:
                runner.offer(batch)
        for done in flushes:
            done.set()

    def _drain(self) -> Batch | None:
        found: dict[type, list[Any]] = {kind: [] for kind in (StepRow, LayerRows, Histogram, DeviceRow, Event)}
        count = len(self.waiting)
        for _ in range(count):
            part, message = self.waiting.popleft()
            kept = found.get(type(message))
            if kept is None:
                self.count_drop()
                continue
            if part and not getattr(message, "part", part):
                from dataclasses import replace

                message = replace(message, part=part)
            kept.append(message)
        return Batch(*found.values()) if count else None

    def _write(self, batch: Batch) -> None:
        if self._trouble is not None and time.monotonic() < self._retry_at:
            self.count_drop(_size(batch))
            return
        try:
            if self._store is None:
                from surefoot.record.store import Store

                self._store = Store(self.folder)
            self._store.write(batch)
        except Exception as error:
            self._failed(batch, error)

    def _failed(self, batch: Batch, error: Exception) -> None:
        self.count_drop(_size(batch))
        if self._trouble is None:
            log.warning("The run log in %s cannot be written (%s): training goes on without it.", self.folder, error)
        self._trouble = error
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self._store = None

    def _end(self) -> None:
        try:
            if self._store is not None:
                self._store.close()
        except OSError:
            pass
        close_all(self._runners, SINK_SECONDS)
        self._ended.set()


def _size(batch: Batch) -> int:
    return sum(map(len, (batch.steps, batch.layers, batch.histograms, batch.devices, batch.events)))
