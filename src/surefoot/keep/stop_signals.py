"""Signals that request a run to stop: complete the step, save, exit. A second signal exits immediately.

Handlers are installed only while batches are being drawn from `stabilizer.resume(loader)`, or in a loop over
`stabilizer.epochs(total)`, in the main thread, and only in place of Python's own: a program that handles a signal
itself continues to do so. The exit status is 128 + the signal's number, as after a death by that signal, so that the
launcher knows that the run is not finished.

A terminal and a scheduler send their signal to every process of the run. Torch's own handler would fail in the middle
of a step when data loading workers end; here the run saves its state.

A loader may wait for a long time, or indefinitely. While the run only waits for the next batch, its state is complete,
and there is no step to finish: the signal ends the wait with `StopWaiting`, raised from the handler.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from surefoot.keep.dead_workers import is_workers_handler

if TYPE_CHECKING:
    from types import FrameType

_RECEIVING = ("multiprocessing.reduction", "multiprocessing.resource_sharer", "torch.multiprocessing.reductions")
"""The function in which tensors of a worker are received."""
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class StopWaiting(SystemExit):
    """Raised inside the loader. Caught by the draw, which saves and exits."""


class StopSignals:
    """Records the first signal that requests the run to stop."""

    def __init__(self, signals: Sequence[int]) -> None:
        self._signals = tuple(signals)
        self._process = os.getpid()
        self.received: int | None = None
        self._waiting = False

    def begin_waiting(self) -> None:
        """From now on, a signal raises `StopWaiting` in the main thread, including one that has already arrived."""
        self._waiting = True
        if self.received is not None:
            raise StopWaiting(128 + self.received)

    def end_waiting(self) -> None:
        """A batch or an error has arrived: from now on, signals are only recorded."""
        self._waiting = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals during the body."""
        before: dict[int, Any] = {}
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in self._signals}
            before = {number: handler for number, handler in before.items() if handler in _DEFAULTS}
        for number in before:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        forked = os.getpid() != self._process  # a child process that inherited these handlers
        if self.received is not None or (forked and number == signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = number
        if forked:
            return
        _ignore_ended_workers()
        # Write to the descriptor: the handler may have interrupted a `print` or the logger.
        name = signal.Signals(number).name
        stops_now = self._waiting and not _is_receiving(frame)
        when = "" if stops_now else " after this step"
        message = f"surefoot: {name}: saving{when}, then exiting. A second signal exits immediately.\n"
        os.write(2, message.encode())
        if stops_now:
            self._waiting = False
            raise StopWaiting(128 + number)


def _is_receiving(frame: FrameType | None) -> bool:
    """Whether a worker is sending a batch right now.

    An interruption would make the worker fail on its side of the connection. The batch is about to arrive, so the run
    stops after the step with it.
    """
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name in _RECEIVING or (name == "multiprocessing.connection" and "recv" in frame.f_code.co_name):
            return True
        frame = frame.f_back
    return False


def _ignore_ended_workers() -> None:
    """The run is ending, so the end of its data loading workers is not an error.

    The handler is a function and not `SIG_DFL`: Python prints an error if a signal arrives before its handler is set to
    the default and is processed after that.
    """
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if is_workers_handler(handler):
        signal.signal(signal.SIGCHLD, _do_nothing)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal without any effect."""
