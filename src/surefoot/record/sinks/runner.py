"""Keep a sink away from the training loop: a thread and a bounded queue of its own.

`offer` only appends and never waits for the sink. When the queue is full the oldest rows are dropped and counted, but
their events stay: an alarm matters more than one more point of a curve. A sink that raises is warned about once, tried
again with growing pauses, and given up after too many failures in a row. A batch that fails by itself is set aside
after a few tries, so that one strange value does not cost the sink everything that follows.

A sink that hangs keeps its own (daemon) thread and nothing else: `close` waits as long as it was told to and no longer.
In a forked child (a data loader's worker) the thread does not exist and `offer` and `close` do nothing: the run is the
parent's.

Left out: a sink is not stopped in the middle of a call. Python cannot end a thread from outside.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from surefoot.errors import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surefoot.record.messages import Batch, Event, Sink

log = logging.getLogger("surefoot")

TRIES_PER_BATCH = 3
LONGEST_PAUSE_SECONDS = 30.0
MOST_EVENTS_HELD = 1000
TICK_SECONDS = 1.0


class SinkRunner:
    """Runs one sink in a thread of its own. Threads may share it; nothing it does raises or waits for the sink."""

    def __init__(self, sink: Sink, *, capacity: int = 256, attempts: int = 8, pause_seconds: float = 0.5) -> None:
        for method in ("write", "close"):
            require(callable(getattr(sink, method, None)), f"a sink needs `write(batch)` and `close()`; got {sink!r}.")
        require(capacity >= 1, f"`capacity` (batches that may wait) must be at least 1; got {capacity}.")
        require(attempts >= 1, f"`attempts` (failures in a row before giving up) must be at least 1; got {attempts}.")
        require(pause_seconds >= 0, f"`pause_seconds` must not be negative; got {pause_seconds}.")
        self.name = type(sink).__name__
        self._sink = sink
        self._capacity = capacity
        self._attempts = attempts
        self._pause_seconds = pause_seconds
        self._tick = getattr(sink, "tick", None)  # optional: a sink that has something to do as time passes
        self._queue: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._dropped = 0
        self._failures = 0  # in a row
        self._warned = self._told_slow = self._told_unfinished = self._ticked = False
        self._closing = self._given_up = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"surefoot-{self.name}", daemon=True)
        self._start()

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # the machine or the user may have no more threads
            self._given_up = True
            log.warning("Nothing is sent to %s (%s); training and the run log go on.", self.name, error)

    @property
    def dropped(self) -> int:
        """How many rows and events the sink never got, or could not take."""
        return self._dropped

    @property
    def given_up(self) -> bool:
        """Whether the sink failed so often that it is no longer fed."""
        return self._given_up

    def offer(self, batch: Batch) -> None:
        """Put a batch in line for the sink. Returns at once; what does not fit is dropped and counted."""
        if os.getpid() != self._process:
            return
        with self._changed:
            if self._closing or self._given_up:
                self._dropped += _size(batch)
                return
            self._queue.append(batch)
            overfull = len(self._queue) > self._capacity
            if overfull:
                self._make_room()
            self._changed.notify_all()
        if overfull and not (self._told_slow or self._warned):
            self._told_slow = True
            since = self._busy_since
            waited = "" if since is None else f" (it has been busy with one for {time.monotonic() - since:.0f} s)"
            log.warning(
                "%s does not keep up%s: the oldest rows in its queue are dropped and counted. Training and the run "
                "log are not affected.",
                self.name,
                waited,
            )

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until the sink has taken in all it was offered, `timeout` seconds at most; whether it has."""
        if os.getpid() != self._process:
            return True
        with self._changed:
            idle = self._changed.wait_for(lambda: self._given_up or self._is_idle(), timeout)
        return idle and not self._given_up

    def begin_close(self) -> None:
        """Let the sink take in what waits and close it, without waiting for that."""
        if os.getpid() == self._process:
            with self._changed:
                self._closing = True
                self._changed.notify_all()

    def close(self, timeout: float = 5.0) -> None:
        """Let the sink take in what waits, close it, and return: after `timeout` seconds at the latest."""
        if os.getpid() != self._process:
            return
        self.begin_close()
        if self._thread.ident is None:  # it could not be started
            return
        if self._thread is not threading.current_thread():
            self._thread.join(max(timeout, 0.0))
        if self._thread.is_alive() and not self._told_unfinished:
            self._told_unfinished = True
            waiting = sum(map(_size, tuple(self._queue)))
            log.warning(
                "%s did not finish in time and is left behind; %d rows and events were still waiting for it.",
                self.name,
                waiting,
            )

    def _make_room(self) -> None:
        oldest, following = self._queue.popleft(), self._queue.popleft()
        events: tuple[Event, ...] = (*oldest.events, *following.events)
        self._dropped += _size(oldest) - len(oldest.events) + max(0, len(events) - MOST_EVENTS_HELD)
        self._queue.appendleft(replace(following, events=events[-MOST_EVENTS_HELD:]))

    def _is_idle(self) -> bool:
        return not self._queue and self._busy_since is None

    # Everything below runs in the sink's own thread.

    def _run(self) -> None:
        while not self._given_up:
            batch = self._next()
            if batch is None:
                break
            self._deliver(batch)
            with self._changed:
                self._busy_since = None
                self._changed.notify_all()
        self._close_sink()

    def _next(self) -> Batch | None:
        """The next batch, or `None` when the run is over; ticks while there is none, at once the first time."""
        while True:
            pause = TICK_SECONDS if self._ticked else 0.0
            with self._changed:
                self._changed.wait_for(
                    lambda: self._queue or self._closing or self._given_up, pause if self._tick else None
                )
                if self._queue:
                    self._busy_since = time.monotonic()
                    return self._queue.popleft()
                if self._closing or self._given_up:
                    return None
            self._try_tick()

    def _deliver(self, batch: Batch) -> None:
        for _ in range(TRIES_PER_BATCH):
            try:
                self._sink.write(batch)
            except BaseException as error:  # a SystemExit in here is the sink's failure too, not the user's wish
                self._failed(error)
            else:
                self._failures = 0
                return
            if self._given_up:
                break
            self._pause()
        with self._changed:
            self._dropped += _size(batch)

    def _failed(self, error: BaseException) -> None:
        self._failures += 1
        if not self._warned:
            self._warned = True
            log.warning(
                "%s failed (%s: %s). It is tried again, %d times in a row at most; training and the run log go on.",
                self.name,
                type(error).__name__,
                error,
                self._attempts,
            )
        if self._failures >= self._attempts:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        with self._changed:
            self._given_up = True
            self._dropped += sum(map(_size, self._queue))
            self._queue.clear()
            self._changed.notify_all()
        log.warning(
            "%s is given up after %d failures in a row, the last one %s: %s. Nothing more is sent to it; training and "
            "the run log go on.",
            self.name,
            self._failures,
            type(error).__name__,
            error,
        )

    def _pause(self) -> None:
        """Wait before the next try, longer each time; not at all once the run is over."""
        seconds = min(self._pause_seconds * 2 ** (self._failures - 1), LONGEST_PAUSE_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)

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
            if self._failures == 0:  # otherwise it has been said that it fails
                log.warning("%s failed as it was closed (%s: %s).", self.name, type(error).__name__, error)


def close_all(runners: Sequence[SinkRunner], timeout: float) -> None:
    """Close several sinks at the same time: `timeout` is for all of them together."""
    until = time.monotonic() + timeout
    for runner in runners:
        runner.begin_close()
    for runner in runners:
        runner.close(max(0.0, until - time.monotonic()))


def _size(batch: Batch) -> int:
    return sum(map(len, (batch.steps, batch.layers, batch.histograms, batch.devices, batch.events)))
