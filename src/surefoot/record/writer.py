"""The thread that writes the run log, and the queue that feeds it.

The training thread only appends to a bounded queue. This thread checks ten times a second how much is waiting, and
twice a second converts all of it into record batches, appends them to the files and offers them to the sinks. Messages
that do not fit into the queue are dropped and counted, and the count becomes an event.

Nothing here raises into training. If the disk fails, one warning is logged; events wait until it works again, rows are
dropped and counted, and the writer tries again every ten seconds. Sinks still get everything.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surefoot.core.redaction import Redactor
from surefoot.record.collectives import COLLECTIVE_FAILED, collective_event, failed_collective
from surefoot.record.derived_events import Derived
from surefoot.record.messages import (
    SINK_DROPPED,
    Batch,
    BatchesDrawn,
    CheckpointsExpected,
    DeviceRow,
    Event,
    Histogram,
    LayerRows,
    SessionBegins,
    Sink,
    StepRow,
)
from surefoot.record.progress_alarms import ProgressAlarms, RunProgress
from surefoot.record.sinks.batch_queue import size_of
from surefoot.record.sinks.runner import SinkRunner, close_all

if TYPE_CHECKING:
    import weakref
    from pathlib import Path

    from surefoot.core.folder_lock import Hold
    from surefoot.record.limits import LogLimits
    from surefoot.record.store import Store

log = logging.getLogger("surefoot")

WAITING_MESSAGES = 16384
"""The maximum number of waiting messages."""
WAITING_EVENTS = 1024
"""The number of events that may wait beyond that: many rows must not displace an event."""
WAITING_LAYER_ROWS = 2_000_000
"""The maximum number of waiting rows of layers, in all messages together: about 50 MB."""
TICK_SECONDS = 0.1
CYCLE_SECONDS = 0.5
SINK_SECONDS = 5.0
"""The maximum time for all sinks together to end."""
LAST_READING_SECONDS = 0.5
"""At the end, sources are called again if their last answer is older: a short run would lack its second half."""
RETRY_SECONDS = 10.0
"""The pause after a disk failure."""
DROPS_SECONDS = 10.0
"""The time between two events that report drops; doubled each time, up to an hour."""
_KINDS: tuple[type, ...] = (StepRow, LayerRows, Histogram, DeviceRow, Event)


class RowSource:
    """A source that is called for messages at intervals, in the writer's thread."""

    def __init__(self, ask: Callable[[], Iterable[Any]], every_seconds: float) -> None:
        self.ask, self.every_seconds = ask, every_seconds
        self.asked = self.due = 0.0


class Writer:
    """Owns the queue and the thread. Other threads use the public names only."""

    def __init__(
        self, folder: Path, sinks: Sequence[Sink], limits: LogLimits, lock: Hold, progress: ProgressAlarms | None = None
    ) -> None:
        self.folder, self._folder_lock = folder, lock
        self.waiting: deque[tuple[str, Any]] = deque()
        """Queued messages, each with its part."""
        self.layer_rows = 0
        """The approximate number of queued rows of layers."""
        self.room = WAITING_MESSAGES
        """The maximum number of waiting messages; 0 after the log is closed."""
        self.dropped = 0
        self.close_at_exit = True
        """False if the owner of the log has more to write at the end of the program."""
        self.sources: list[RowSource] = []
        self.before_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        """Called before the log is closed."""
        self._counting = threading.RLock()  # a signal handler may log too, while this is held
        self._process = os.getpid()
        self._disk = Disk(folder, limits)
        self._batches = BatchBuilder(progress)
        self._wake, self._ended = threading.Event(), threading.Event()
        self._flushes: deque[threading.Event] = deque()
        self._closing, self._deadline = False, 0.0
        self._error: BaseException | None = None
        self._runners = [SinkRunner(sink, folder) for sink in sinks]  # here: an invalid sink is refused immediately
        self._thread = threading.Thread(target=self._run, name="surefoot-run-log", daemon=True)
        self._start()

    @property
    def closed(self) -> bool:
        """Whether the log has ended or is about to."""
        return self._closing

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # the limit on threads may be reached
            self.room, self._closing = 0, True
            self._folder_lock.release()
            self._ended.set()
            log.warning("The run log in %s cannot be written (%s); training continues without it.", self.folder, error)

    def has_room_for_event(self) -> bool:
        """Whether an event may wait although the queue is full of other messages."""
        return self.room > 0 and len(self.waiting) < self.room + WAITING_EVENTS

    def count_drop(self, messages: int = 1) -> None:
        """Count lost messages."""
        with self._counting:
            self.dropped += messages

    def flush(self, timeout: float) -> bool:
        """Wait until everything taken so far is on disk; returns whether it is."""
        if not self._is_ours() or self._ended.is_set() or threading.current_thread() is self._thread:
            return False
        done = threading.Event()
        self._flushes.append(done)
        self._wake.set()
        return done.wait(timeout) and self._disk.works

    def close(self, timeout: float, error: BaseException | None = None) -> None:
        """Write what waits and end, within `timeout` seconds; `error` is the error that ended the run."""
        self._error = self._error or error
        if not self._is_ours() or self._ended.is_set():
            return
        self._call_before_close()
        self.end_soon(timeout)
        self._wake.set()
        if threading.current_thread() is not self._thread and not self._ended.wait(timeout):
            log.warning("The run log in %s was not finished within %g s: its end may be missing.", self.folder, timeout)

    def _call_before_close(self) -> None:
        callbacks, self.before_close = self.before_close, []
        for reference in callbacks:
            callback = reference()
            try:
                if callback is not None:
                    callback()
            except Exception as error:
                log.warning(
                    "The run log in %s lacks its last steps (%s: %s).", self.folder, type(error).__name__, error
                )

    def end_soon(self, timeout: float) -> None:
        """The end of `close`, without waiting. Takes no lock: the garbage collector may call it at any point."""
        if self._is_ours() and not self._closing:
            self.room = 0
            self._deadline = time.monotonic() + timeout
            self._closing = True

    def silence(self) -> None:
        """Accept nothing in a fork (a data loader's worker), in which no thread writes."""
        self.room = 0
        self.waiting = deque()
        self._counting = threading.RLock()  # another thread may have held the old one

    def _is_ours(self) -> bool:
        return os.getpid() == self._process

    # Everything below runs in the writer's own thread.

    def _run(self) -> None:
        try:
            self._disk.open()  # imports pyarrow while training starts
            self._loop()
        except BaseException as error:  # a bug, or no memory: training must not be affected
            what = f"{type(error).__name__}: {error}"
            log.warning("The run log in %s has ended (%s); training continues without it.", self.folder, what)
        finally:
            self.room = 0
            self._folder_lock.release()
            self._ended.set()
            while self._flushes:
                self._flushes.popleft().set()

    def _loop(self) -> None:
        due = 0.0
        while True:
            self._batches.tick()
            closing, now = self._closing, time.monotonic()
            crowded = len(self.waiting) > WAITING_MESSAGES // 4 or self.layer_rows > WAITING_LAYER_ROWS // 4
            if closing or self._flushes or now >= due or crowded:
                due = now + CYCLE_SECONDS
                self._cycle(closing)
            if closing:
                break
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()
        self._disk.close()
        close_all(self._runners, min(SINK_SECONDS, max(0.1, self._deadline - time.monotonic() - 0.5)))

    def _cycle(self, closing: bool) -> None:
        flushes = [self._flushes.popleft() for _ in range(len(self._flushes))]
        self._read_sources(closing)
        self.layer_rows = 0
        sessions = _by_session(self.waiting.popleft() for _ in range(len(self.waiting)))
        for number, waiting in enumerate(sessions):
            if number:
                self._disk.begin_session()
                self._batches.begin_session()
            batch, unknown = self._batches.build(waiting)
            self.count_drop(unknown)
            ends = closing and number == len(sessions) - 1
            if self._disk.works:
                batch = self._batches.with_drops(batch, self.dropped, ends)
            batch = self._batches.with_sink_drops(batch, self._runners) if ends else batch
            batch = _redacted(self._batches.with_end(batch, self._error) if ends else batch)
            if any((batch.steps, batch.layers, batch.histograms, batch.devices, batch.events)):
                self.count_drop(self._disk.write(batch, patient=not (closing or flushes)))
                for runner in self._runners:
                    runner.offer(batch)
        for done in flushes:
            done.set()

    def _read_sources(self, closing: bool) -> None:
        now = time.monotonic()
        for source in list(self.sources):
            if now < source.due and not (closing and now > source.asked + LAST_READING_SECONDS):
                continue
            source.asked, source.due = now, now + source.every_seconds
            try:
                self.waiting.extend(("", message) for message in source.ask())
            except Exception as error:
                self.sources.remove(source)
                log.warning("%r failed and is no longer called: %s: %s", source.ask, type(error).__name__, error)


class BatchBuilder:
    """Puts messages into batches and adds derived events. Used only by the writer's thread."""

    def __init__(self, progress: ProgressAlarms | None = None) -> None:
        self._progress = None if progress is None else RunProgress(progress)
        self._step: int | None = None
        """The current step of the run."""
        self._resumed_at: int | None = None
        """The step that the run continues from. A run that had ended takes no further one."""
        self._has_end = self._has_failed_collective = False
        self._derived: defaultdict[str, Derived] = defaultdict(Derived)
        self._reported, self._report_at, self._report_pause = 0, 0.0, DROPS_SECONDS

    def build(self, waiting: Iterable[tuple[str, Any]]) -> tuple[Batch, int]:
        """A batch of messages, each given with its part; and the number of messages of unknown kinds."""
        found: dict[type, list[Any]] = {kind: [] for kind in _KINDS}
        unknown, drew = 0, False
        for part, message in waiting:
            kept = found.get(type(message))
            if kept is None:
                drew |= type(message) is BatchesDrawn
                unknown += not self._is_known(part, message)
                continue
            if part and kept is not found[DeviceRow] and not message.part:
                message = replace(message, part=part)
            kept.append(message)
        steps, devices = found[StepRow], found[DeviceRow]
        self._step = steps[-1].step if steps else self._step
        self._resumed_at = next((e.step for e in found[Event] if e.event == "resume"), self._resumed_at)
        found[Event] = [*map(self._with_step, found[Event]), *self._derive(steps)]
        found[Event] += self._progress_of(steps, found[Event], drew)
        self._has_end = self._has_end or any(event.event in ("end", "halt") for event in found[Event])
        self._has_failed_collective |= any(event.cause == COLLECTIVE_FAILED for event in found[Event])
        found[DeviceRow] = [row if row.step is not None else replace(row, step=self._step) for row in devices]
        return Batch(*found.values()), unknown

    def tick(self) -> None:
        """Count the time in which this process runs."""
        if self._progress is not None:
            self._progress.tick()

    def _is_known(self, part: str, message: Any) -> bool:
        """Whether a message that is not written is about the progress of the run."""
        if type(message) is CheckpointsExpected and self._progress is not None:
            self._progress.expect(part, message)
        return type(message) in (CheckpointsExpected, BatchesDrawn)

    def _progress_of(self, steps: Sequence[StepRow], events: Sequence[Event], drew: bool) -> list[Event]:
        try:
            return [] if self._progress is None else self._progress.take(steps, events, drew)
        except (TypeError, ArithmeticError):  # a custom row with values that are not numbers
            return []

    def begin_session(self) -> None:
        """The run has returned to an earlier step: derived events start again."""
        self._derived.clear()

    def _with_step(self, event: Event) -> Event:
        """Give a device's event the current step of the run."""
        return replace(event, step=self._step) if event.step is None and event.event == "alarm" else event

    def _derive(self, steps: Sequence[StepRow]) -> list[Event]:
        try:
            return [event for row in steps for event in self._derived[row.part].take(row)]
        except (TypeError, ArithmeticError):  # a custom row with values that are not numbers
            return []

    def with_end(self, batch: Batch, error: BaseException | None) -> Batch:
        """Add the end of the run, if it is missing: it distinguishes a run that ended from one that was killed."""
        at = self._resumed_at if self._step is None else self._step
        if at is None or self._has_end:
            return batch
        summary, severity = "the log was closed", "info"
        events = [*batch.events]
        if error is not None:
            what = f"{type(error).__name__}: {error}"
            summary, severity = f"the program ended with {what}"[:500], "error"
            events += self._failed_collective(error)
        events.append(Event("end", at, summary, time.time(), severity))  # type: ignore[arg-type]
        return replace(batch, events=events)

    def _failed_collective(self, error: BaseException) -> list[Event]:
        """The event for a failed collective that ended the program, if it is not in the log yet."""
        failed = None if self._has_failed_collective else failed_collective(error)
        return [] if failed is None else [collective_event(failed, self._step)]

    def with_drops(self, batch: Batch, dropped: int, closing: bool) -> Batch:
        """Add an event if messages were dropped since the last one, `dropped` in total; at growing intervals."""
        now, lost = time.monotonic(), dropped - self._reported
        if lost == 0 or (now < self._report_at and not closing):
            return batch
        self._reported += lost
        self._report_at, self._report_pause = now + self._report_pause, min(self._report_pause * 2, 3600.0)
        summary = (
            f"{lost:,} messages were not logged: they arrived faster than they could be written, or the disk failed"
        )
        event = Event("drops", self._step, summary, time.time(), evidence={"dropped": lost})
        return replace(batch, events=[*batch.events, event])

    def with_sink_drops(self, batch: Batch, runners: Sequence[SinkRunner]) -> Batch:
        """Add an event for each sink that lost rows or events; later losses are logged when it closes."""
        found = [
            Event(
                "alarm",
                self._step,
                f"{runner.dropped:,} rows and events did not reach {runner.name}",
                time.time(),
                cause=SINK_DROPPED,
                evidence={"dropped": runner.dropped, "sink": runner.name},
            )
            for runner in runners
            if runner.dropped
        ]
        return replace(batch, events=[*batch.events, *found]) if found else batch


class Disk:
    """Writes to the run folder: a failure is logged once, retried at intervals, and never raised."""

    def __init__(self, folder: Path, limits: LogLimits) -> None:
        self._folder, self._limits = folder, limits
        self._store: Store | None = None
        self.works = True
        """Whether the last write succeeded."""
        self._retry_at = 0.0

    def open(self) -> None:
        """Create the folder, unless that fails."""
        try:
            self._opened()
        except Exception as error:
            self._fail(error)

    def write(self, batch: Batch, patient: bool) -> int:
        """Write a batch; returns the number of lost messages. With `patient`, pauses after a disk failure."""
        if patient and not self.works and time.monotonic() < self._retry_at:
            return size_of(batch) if self._store is None else self._store.keep_events(batch)
        try:
            store = self._opened()
        except Exception as error:
            self._fail(error)
            return size_of(batch)
        loss = store.write(batch)
        if loss.error is not None:
            self._fail(loss.error)
        elif not self.works:
            self.works = True
            log.info("The run log in %s can be written again.", self._folder)
        return loss.messages

    def close(self) -> None:
        """Mark the ends of the files."""
        if self._store is not None:
            loss = self._store.close()
            if loss.error is not None:
                self._fail(loss.error)

    def begin_session(self) -> None:
        """Start another session for what follows."""
        self.close()
        self._store = None

    def _opened(self) -> Store:
        from surefoot.record.store import Store

        if self._store is not None and self._store.vanished():
            self._store.release()
            self._store = None
            log.warning("The run log in %s was deleted; it is started again.", self._folder)
        if self._store is None:
            self._store = Store(self._folder, self._limits)
        return self._store

    def _fail(self, error: Exception) -> None:
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if self.works:
            self.works = False
            log.warning(
                "The run log in %s cannot be written (%s: %s). Training continues; writing is tried again every %g s, "
                "and lost rows are counted.",
                self._folder,
                type(error).__name__,
                error,
                RETRY_SECONDS,
            )


def _by_session(waiting: Iterable[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    """The messages in order, one list for each session."""
    sessions: list[list[tuple[str, Any]]] = [[]]
    for part, message in waiting:
        if type(message) is SessionBegins:
            sessions.append([])
        else:
            sessions[-1].append((part, message))
    return sessions


def _redacted(batch: Batch) -> Batch:
    """The batch without secrets in the texts of its events, for the disk and the sinks."""
    if not batch.events:
        return batch
    redact = Redactor(identity=False)

    return replace(batch, events=[_shown(event, redact) for event in batch.events])


def _shown(event: Event, redact: Redactor) -> Event:
    words = {name: _text(redact, getattr(event, name)) for name in ("summary", "cause", "action", "part")}
    try:
        evidence = redact.inside(event.evidence)
    except RecursionError:
        evidence = {"left_out": "it holds itself"}
    return replace(event, **words, evidence=evidence)


def _text(redact: Redactor, value: Any) -> Any:
    return redact(value) if isinstance(value, str) else value
