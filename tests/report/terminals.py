"""Processes with a terminal of their own, read byte by byte."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from screen import Screen

from patience import HANG_SECONDS, ended

SOURCE = Path(__file__).parents[2] / "src"
TAKE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
"""The first line of a script here: the terminal on its stdin is the one that Ctrl-C comes from."""


class InTerminal:
    """A Python script in a terminal. stdout can go elsewhere."""

    def __init__(self, script, columns=80, lines=24, stdout=None, arguments=(), **environment):
        self._master, slave = pty.openpty()
        self.resize(columns, lines)
        self.screen, self.raw, self._pending = Screen(columns, lines), b"", b""
        variables = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm-256color", "RANK": "0", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL + script, *map(str, arguments)],
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            start_new_session=True,
            env=variables,
        )
        os.close(slave)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, keys):
        os.write(self._master, keys)

    def resize(self, columns, lines):
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read_until(self, condition):
        """Read until the screen is as wanted."""
        until = time.monotonic() + HANG_SECONDS
        while not condition(self.screen):
            assert time.monotonic() < until, "the screen shows\n" + "\n".join(self.screen.rows)
            assert self._read(0.2), "the terminal was closed; it showed\n" + "\n".join(self.screen.rows)

    def read_to_end(self):
        """Read until every process has let go of the terminal: the exit status."""
        until = time.monotonic() + HANG_SECONDS
        while self._read(0.2):
            assert time.monotonic() < until, "the screen shows\n" + "\n".join(self.screen.rows)
        self.screen.feed(self._pending)
        return ended(self.process)

    def _read(self, seconds):
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # on Linux, how the end of a terminal looks
            return False
        self.raw += data
        self._pending += data
        # A sequence, or a character of several bytes, may be cut in the middle: feed what is whole.
        cut = max(self._pending.rfind(b"\n") + 1, self._pending.rfind(b"\x1b8") + 2 if b"\x1b8" in self._pending else 0)
        whole, self._pending = self._pending[:cut], self._pending[cut:]
        self.screen.feed(whole)
        return bool(data)
