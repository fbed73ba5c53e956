"""Keys typed into a full-screen view, and a clean end of the view on SIGTERM."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Keys:
    """Keys typed while the view is shown."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def asked_to_quit(self, seconds: float) -> bool:
        """Wait this long, or until `q` is typed; returns whether it was."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left)
            elif select.select([self._descriptor], [], [], left)[0]:
                typed = os.read(self._descriptor, 64)
                if b"q" in typed.lower() or not typed:  # empty: the terminal is closed
                    return True
        return False


@contextmanager
def keys_of_terminal() -> Iterator[Keys]:
    """Read keys one by one without echo, if stdin is a terminal; its settings are restored afterwards."""
    try:
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except Exception:  # no terminal (`termios.error` is an Exception of its own), no stdin, or Windows
        yield Keys(None)
        return
    tty.setcbreak(descriptor)
    try:
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """Exit on SIGTERM in a way that restores the screen."""

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
