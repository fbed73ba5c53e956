"""Signals that ask a run to stop: complete the step, save, exit. A second signal exits immediately.

Handlers are installed only while batches are being drawn from `stabilizer.resume(loader)`, or in a loop over
`stabilizer.epochs(total)`, in the main thread, and only in place of Python's own: a program that handles a signal
itself keeps doing so. The exit status is 128 + the signal's number, as after a death by that signal, so that whoever
started the run knows that it is not finished.

A terminal and a scheduler send their signal to every process of the run. Data loading workers that it ends are no
reason to fail in the middle of a step, as torch's own handler would: the run saves what it has.

A loader may wait for a long time, or indefinitely. While the run does nothing but wait for the next batch, its state is
whole, and there is no step to finish: the signal ends the waiting with `StopWaiting`, raised from the handler.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from surefoot.keep.dead_workers import is_workers_handler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

_HAND_OVER = ("multiprocessing.reduction", "multiprocessing.resource_sharer", "torch.multiprocessing.reductions")
"""Where tensors of a worker are received."""
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class StopWaiting(SystemExit):
    """Raised out of whatever the loader does. Caught by the draw, which saves and exits."""


class StopSignals:
    """Notes the first signal that asks the run to stop."""

    def __init__(self, signals: Sequence[int]) -> None:
        self._signals = tuple(signals)
        self._process = os.getpid()
        self.received: int | None = None
        self._waiting = False

    def begin_waiting(self) -> None:
        """From here on, a signal raises `StopWaiting` in the main thread, including one that has already arrived."""
        self._waiting = True
        if self.received is not None:
            raise StopWaiting(128 + self.received)

    def end_waiting(self) -> None:
        """There is a batch, or an error: signals are noted again, and no more."""
        self._waiting = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals for as long as this lasts."""
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
        forked = os.getpid() != self._process  # a child that has these handlers with the rest of its memory
        if self.received is not None or (forked and number == signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = number
        if forked:
            return
        _ignore_ended_workers()
        # Straight to the descriptor: the handler may have interrupted a `print` or the logger.
        name = signal.Signals(number).name
        stops_now = self._waiting and not _is_receiving(frame)
        when = "" if stops_now else " after this step"
        message = f"surefoot: {name}: saving{when}, then exiting. A second signal exits immediately.\n"
        os.write(2, message.encode())
        if stops_now:
            self._waiting = False
            raise StopWaiting(128 + number)


def _is_receiving(frame: FrameType | None) -> bool:
    """Whether a worker is handing over a batch right now.

    To leave in the middle of that would make the worker fail on its side of the connection. The batch is about to
    arrive, so the run stops after the step with it.
    """
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name in _HAND_OVER or (name == "multiprocessing.connection" and "recv" in frame.f_code.co_name):
            return True
        frame = frame.f_back
    return False


def _ignore_ended_workers() -> None:
    """The run ends: that data loading workers do, too, is no error any more."""
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if is_workers_handler(handler):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
