"""`RunLog`: writes a run into a folder. The training loop only appends to a queue; a thread writes.

>>> import tempfile, surefoot
>>> folder = tempfile.mkdtemp()
>>> with surefoot.RunLog(folder) as log:
...     log.take(StepRow(step=0, time=0.0, loss=2.5))
...     log.event("checkpoint", 0, "the first checkpoint")
>>> surefoot.load_run(folder).scalars["loss"].to_pylist()
[2.5]
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.core.folder_lock import hold, rank_of_process
from surefoot.core.settings import is_number, shown
from surefoot.errors import require
from surefoot.record.limits import LogLimits
from surefoot.record.messages import (
    CheckpointsExpected,
    DeviceRow,
    Event,
    EventName,
    Histogram,
    LayerRows,
    SessionBegins,
    Sink,
    StepRow,
)
from surefoot.record.progress_alarms import ProgressAlarms
from surefoot.record.writer import WAITING_LAYER_ROWS, RowSource, Writer

if TYPE_CHECKING:
    from surefoot.observe.device import DeviceMonitor
    from surefoot.types import Severity

USUAL_ALARMS = ProgressAlarms()
EXIT_SECONDS = 10.0
"""The maximum time that the end of the program waits for the log."""


class RunLog:
    """Writes a run into `folder`. No method raises into training, waits for the disk or needs the device.

    `sinks` are further destinations of all messages, each with its own thread. `limits` bounds the size of the folder.
    A folder that already contains a run is continued, as when a run is resumed from a checkpoint. A folder that another
    process is writing into is refused with `FolderInUse`. `progress` sets when a run is reported that has stalled, has
    become slower or writes no checkpoints; `None` disables this. Host and devices are read every `device_seconds`, or
    never.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sinks: Sequence[Sink] = (),
        limits: LogLimits | None = None,
        progress: ProgressAlarms | None = USUAL_ALARMS,
        device_seconds: float | None = 5.0,
        close_at_exit: bool = True,
    ) -> None:
        _check_settings(sinks, limits, progress, device_seconds)
        self.folder = Path(folder).absolute()
        self._part, self.progress = "", progress
        lock = hold(self.folder, "log", rank_of_process())  # the ranks of a job may share a folder
        try:
            self._writer = Writer(self.folder, tuple(sinks), limits or LogLimits(), lock, progress)
        except BaseException:
            lock.release()
            raise
        self._writer.close_at_exit = close_at_exit
        self._open = _OpenLog()
        """Shared with the parts: when no reference to it is left, nothing can log, and the log ends."""
        weakref.finalize(self._open, self._writer.end_soon, EXIT_SECONDS).atexit = False
        if device_seconds is not None:
            self.sample(DeviceReadings(), device_seconds)
        _WRITERS.add(self._writer)
        atexit.unregister(_close_all)  # to be the latest exit handler: it must run before that of a sink's package,
        atexit.register(_close_all)  # which was loaded with the sink and could end the sink before its last rows

    def part(self, name: str) -> RunLog:
        """The same log for one of several optimizers: its messages have this name. Closing it closes nothing."""
        log = object.__new__(type(self))
        log.folder, log._part, log._writer, log._open = self.folder, name, self._writer, self._open
        log.progress = self.progress
        return log

    def take(
        self, message: StepRow | LayerRows | Histogram | DeviceRow | Event | SessionBegins | CheckpointsExpected
    ) -> None:
        """Append one message to the queue. Never blocks and never raises; if the queue is full, it is dropped and
        counted.

        Objects that the message refers to (arrays, tensors, evidence) must not be changed afterwards.
        """
        writer = self._writer
        is_full = len(writer.waiting) >= writer.room or writer.layer_rows >= WAITING_LAYER_ROWS
        if is_full and not (type(message) is Event and writer.has_room_for_event()):
            writer.count_drop()
            return
        if type(message) is LayerRows:
            writer.layer_rows += _length(message.names)
        writer.waiting.append((self._part, message))

    def sample(self, source: Callable[[], Iterable[Any]], every_seconds: float = 5.0) -> None:
        """Call `source` for messages at intervals, in the writer's thread: for readings of the device.

        It must not hang, or the log does. If it raises, a warning is logged and it is not called again.
        """
        self._writer.sources.append(RowSource(source, every_seconds))

    def event(
        self,
        event: EventName,
        step: int | None,
        summary: str,
        *,
        severity: Severity = "info",
        cause: str = "",
        action: str = "",
        evidence: Mapping[str, Any] | None = None,
    ) -> None:
        """Log an event."""
        self.take(Event(event, step, summary, time.time(), severity, cause, action, self._part, evidence or {}))

    def begin_session(self) -> None:
        """The run has returned to an earlier step: later rows supersede earlier ones, as after a resume."""
        self.take(SessionBegins())

    def before_close(self, callback: Callable[[], None]) -> None:
        """Call a method before the log is closed: its messages are the last that are taken.

        The log does not keep the method's object alive. Exceptions of the method are not raised into training.
        """
        self._writer.before_close.append(weakref.WeakMethod(callback))

    @property
    def closed(self) -> bool:
        """Whether it accepts no more messages."""
        return self._writer.closed

    @property
    def dropped(self) -> int:
        """The number of lost messages: the queue was full, or the disk was."""
        return self._writer.dropped

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything taken so far is on disk, `timeout` seconds at most; returns whether it is."""
        return self._writer.flush(timeout)

    def close(self, timeout: float = EXIT_SECONDS) -> None:
        """Write what is left and close. Happens automatically at the end of the program."""
        if not self._part:
            self._writer.close(timeout)
            _WRITERS.discard(self._writer)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if not self._part:
            self._writer.close(EXIT_SECONDS, error if isinstance(error, Exception) else None)
            _WRITERS.discard(self._writer)


class _OpenLog:
    """An object whose references keep the log open."""


class DeviceReadings:
    """The readings of host and devices, as rows and events. Called in the writer's thread: the imports take a while."""

    def __init__(self) -> None:
        self._monitor: DeviceMonitor | None = None

    def __call__(self) -> Iterator[DeviceRow | Event]:
        """Read everything once."""
        if self._monitor is None:
            from surefoot.observe.device import DeviceMonitor
            from surefoot.observe.device_alarms import DeviceAlarms

            self._monitor, self._alarms = DeviceMonitor(), DeviceAlarms()
        readings, now = self._monitor.read(), time.time()
        yield from (DeviceRow(each.time, each.source, each.step, each.numbers) for each in readings)
        for note in self._alarms.take(readings):
            yield Event("alarm", None, note.summary, now, note.severity, note.cause, evidence=note.evidence)


def _check_settings(sinks: object, limits: object, progress: object, device_seconds: object) -> None:
    require(
        isinstance(sinks, Sequence) and not isinstance(sinks, str),
        f"`sinks` must be a list of sinks, such as [TensorBoardSink('tb')]; got {shown(sinks)}.",
    )
    for name, part, kind in (("limits", limits, LogLimits), ("progress", progress, ProgressAlarms)):
        require(part is None or isinstance(part, kind), f"`{name}` must be a {kind.__name__}; got {shown(part)}.")
    require(
        device_seconds is None or (is_number(device_seconds) and device_seconds > 0),  # type: ignore[operator]
        f"`device_seconds` must be a number above 0, or None; got {shown(device_seconds)}.",
    )


def _length(names: Sequence[str]) -> int:
    try:
        return len(names)
    except TypeError:  # the writer will find the message invalid; training is not affected
        return 0


_WRITERS: weakref.WeakSet[Writer] = weakref.WeakSet()


def _close_all() -> None:
    for writer in list(_WRITERS):
        if writer.close_at_exit:
            writer.close(EXIT_SECONDS, uncaught())


def uncaught() -> BaseException | None:
    """The error that ended the program. Ignored in a notebook or at a prompt: it is the last error of the user."""
    error = getattr(sys, "last_value", None)
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    return error if isinstance(error, BaseException) and not is_interactive else None


def _stop_writers() -> None:
    for writer in list(_WRITERS):
        writer.silence()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_writers)


def part_of(log: RunLog) -> tuple[object, str]:
    """An object that a log and all its parts share and that keeps it open, and the name of this part."""
    return log._open, log._part
