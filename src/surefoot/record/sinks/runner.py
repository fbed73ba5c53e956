"""Runs a sink in its own thread, behind a bounded queue (`batch_queue`), so that training never waits for it.

If a sink raises, a warning is logged once; it is tried again with growing pauses, and disabled after too many
consecutive failures. A batch that fails repeatedly is dropped after a few attempts, so that one invalid value does not
block everything that follows.

A sink that hangs blocks only its own (daemon) thread: `close` waits for the given time and no longer. In a forked child
(a data loader's worker) the thread does not exist, and `offer` and `close` do nothing: the run belongs to the parent.

Not covered: a sink is not stopped in the middle of a call. Python cannot end a thread from outside.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from surefoot.errors import require
from surefoot.record.sinks.batch_queue import BatchQueue, size_of

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.record.messages import Batch, Sink

log = logging.getLogger("surefoot")

TRIES_PER_BATCH = 3
LONGEST_PAUSE_SECONDS = 30.0
TICK_SECONDS = 1.0


class SinkRunner:
    """Runs one sink in its own thread. Thread-safe; no method raises or waits for the sink."""

    def __init__(
        self,
        sink: Sink,
        folder: Path | None = None,
        *,
        capacity: int = 256,
        attempts: int = 8,
        pause_seconds: float = 0.5,
    ) -> None:
        for method in ("write", "close"):
            require(callable(getattr(sink, method, None)), f"a sink needs `write(batch)` and `close()`; got {sink!r}.")
        require(capacity >= 1, f"`capacity` (batches that may wait) must be at least 1; got {capacity}.")
        require(attempts >= 1, f"`attempts` (failures in a row before giving up) must be at least 1; got {attempts}.")
        require(pause_seconds >= 0, f"`pause_seconds` must not be negative; got {pause_seconds}.")
        self.name = type(sink).__name__
        self._sink = sink
        self._attempts = attempts
        self._pause_seconds = pause_seconds
        self._folder = folder
        self._tick = getattr(sink, "tick", None)  # optional: for a sink that acts as time passes
        self._ticked = False
        self._queue = BatchQueue(capacity)
        self._process = os.getpid()
        self._failures = 0  # in a row
        self._warned_failure = self._warned_slow = self._warned_unfinished = False
        self._thread = threading.Thread(target=self._run, name=f"surefoot-{self.name}", daemon=True)
        self._start()

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # the limit on threads may be reached
            self._queue.give_up()
            log.warning("Nothing is sent to %s (%s); training and the run log continue.", self.name, error)

    @property
    def dropped(self) -> int:
        """The number of rows and events that the sink never received, or could not process."""
        return self._queue.dropped

    @property
    def given_up(self) -> bool:
        """Whether the sink was disabled after too many failures."""
        return self._queue.given_up

    def offer(self, batch: Batch) -> None:
        """Queue a batch for the sink. Returns immediately; if the queue is full, rows are dropped and counted."""
        if os.getpid() != self._process:
            return
        full = self._queue.put(batch)
        if full and not (self._warned_slow or self._warned_failure):
            self._warned_slow = True
            busy = self._queue.busy_seconds
            log.warning(
                "%s does not keep up%s: the oldest rows in its queue are dropped and counted. Training and the run "
                "log are not affected.",
                self.name,
                "" if busy is None else f" (it has been busy with one for {busy:.0f} s)",
            )

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until the sink has processed everything offered, `timeout` seconds at most; returns whether it has."""
        return os.getpid() != self._process or self._queue.wait_until_idle(timeout)

    def begin_close(self) -> None:
        """Let the sink process what waits and close it, without waiting."""
        if os.getpid() == self._process:
            self._queue.close()

    def close(self, timeout: float = 5.0) -> None:
        """Let the sink process what waits, close it, and return: after `timeout` seconds at the latest."""
        if os.getpid() != self._process:
            return
        self.begin_close()
        if self._thread.ident is None:  # it could not be started
            return
        if self._thread is not threading.current_thread():
            self._thread.join(max(timeout, 0.0))
        if self._thread.is_alive() and not self._warned_unfinished:
            self._warned_unfinished = True
            log.warning(
                "%s did not finish in time and is abandoned; %d rows and events were not sent.",
                self.name,
                self._queue.waiting,
            )

    # Everything below runs in the sink's own thread.

    def _run(self) -> None:
        self._pass_folder()
        while not self.given_up:
            batch = self._next()
            if batch is None:
                break
            self._queue.delivered(lost=0 if self._deliver(batch) else size_of(batch))
        self._close_sink()

    def _pass_folder(self) -> None:
        opened = getattr(self._sink, "opened", None)  # optional: for a sink that names the folder of the run
        try:
            if callable(opened) and self._folder is not None:
                opened(self._folder)
        except BaseException as error:
            self._failed(error)

    def _next(self) -> Batch | None:
        """The next batch, or `None` when the run has ended; ticks while there is none, immediately the first time."""
        while True:
            pause = TICK_SECONDS if self._ticked else 0.0
            batch, over = self._queue.take(pause if self._tick else None)
            if batch is not None or over:
                return batch
            self._try_tick()

    def _deliver(self, batch: Batch) -> bool:
        """Write a batch, with several attempts and a pause after each failure; returns whether the sink accepted it."""
        for _ in range(TRIES_PER_BATCH):
            try:
                self._sink.write(batch)
            except BaseException as error:  # a SystemExit here is a failure of the sink too, not the user's intention
                self._failed(error)
            else:
                self._failures = 0
                return True
            if self.given_up:
                break
            self._queue.pause(min(self._pause_seconds * 2 ** (self._failures - 1), LONGEST_PAUSE_SECONDS))
        return False

    def _failed(self, error: BaseException) -> None:
        self._failures += 1
        if not self._warned_failure:
            self._warned_failure = True
            log.warning(
                "%s failed (%s: %s). It is tried again, at most %d times in a row; training and the run log continue.",
                self.name,
                type(error).__name__,
                error,
                self._attempts,
            )
        if self._failures >= self._attempts:
            self._queue.give_up()
            log.warning(
                "%s is disabled after %d consecutive failures, the last one %s: %s. Nothing more is sent to it; "
                "training and the run log continue.",
                self.name,
                self._failures,
                type(error).__name__,
                error,
            )

    def _try_tick(self) -> None:
        self._ticked = True
        try:
            if self._tick is not None:
                self._tick()
        except BaseException as error:
            self._failed(error)
            self._tick = None  # without ticks it still gets its batches

    def _close_sink(self) -> None:
        try:
            self._sink.close()
        except BaseException as error:
            if self._failures == 0:  # otherwise a failure was already logged
                log.warning("%s failed when it was closed (%s: %s).", self.name, type(error).__name__, error)


def close_all(runners: Sequence[SinkRunner], timeout: float) -> None:
    """Close several sinks at the same time: `timeout` covers all of them together. Their losses are logged."""
    until = time.monotonic() + timeout
    for runner in runners:
        runner.begin_close()
    for runner in runners:
        runner.close(max(0.0, until - time.monotonic()))
    for runner in runners:
        if runner.dropped:
            log.warning(
                "%s: %d rows and events in all did not reach it; the run log has them.", runner.name, runner.dropped
            )
