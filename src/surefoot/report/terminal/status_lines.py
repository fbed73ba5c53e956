"""A few lines at the bottom of the terminal that stay in place, whatever else is written.

A training script prints, logs, and shows a tqdm bar; C++ libraries and data-loader workers write directly to the
terminal. No part of this process can see all of that, so lines that are rewritten above or below the cursor would get
mixed with it, and replacing `sys.stdout` would change the script. Here the terminal keeps them separate: its scrolling
region is reduced, everything else is written inside it, and the rows below are reserved for these lines. Each redraw is
one write that saves the cursor, fills the rows and restores the cursor.

The cursor is never hidden. `close` releases the rows. A killed process cannot do that, so a small shell waits for its
end and does it. If there is no suitable terminal (none at all, Windows, an interactive session, a job in the
background, a screen of a few rows), `terminal_of` returns `None` and plain lines are written instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_WHOLE_SCREEN = "\x1b[r"
_ERASE_BELOW, _ERASE_LINE = "\x1b[J", "\x1b[2K"
_DOWN = "\x1bD"  # like a line end, but it keeps the column; at the last row it scrolls
_FEWEST_ROWS = 8
_LARGEST_SHARE = 3
"""The lines take at most one row in this many."""
# The trap: Ctrl-C reaches every process of the terminal, and this one must outlive the others. A line on the pipe means
# a normal end; the end of the pipe without a line means that the process was killed.
_RESTORE_SHELL = r"""exec 3<&0; (trap '' INT TERM HUP QUIT TTOU; read word <&3 || printf '\0337\033[r\0338\033[J') &"""


def terminal_of(stream: Any) -> int | None:
    """The descriptor of the terminal behind a stream, if this process can draw status lines there."""
    try:
        if os.name != "posix" or not stream.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
            return None
        if hasattr(sys, "ps1"):  # an interactive session: its prompt uses all rows
            return None
        descriptor = int(stream.fileno())
        size = os.get_terminal_size(descriptor)
        usable = size.lines >= _FEWEST_ROWS and size.columns >= 20
        return descriptor if usable and _in_foreground(descriptor) else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _in_foreground(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # this process has its own session: the terminal belongs to another one
        return False


class StatusLines:
    """The rows at the bottom of one terminal. `draw` and `close` are called by one thread at a time."""

    def __init__(self, descriptor: int, encoding: str, lines_for: Callable[[int], Sequence[str]]) -> None:
        self._descriptor = descriptor
        self._encoding = encoding
        self._lines_for = lines_for
        """Returns the lines for a width, with escape sequences for colours but none that move the cursor."""
        self._size: os.terminal_size | None = None
        self._rows = 0
        self._restore_pipe: int | None = None

    def draw(self, redraw: bool = False) -> None:
        """Draw the current lines. `redraw`: other programs may have used the terminal in the meantime."""
        if not _in_foreground(self._descriptor):
            self._size = None  # stopped or in the background: the terminal belongs to another process
            return
        size = os.get_terminal_size(self._descriptor)
        if size.lines <= _LARGEST_SHARE:
            return
        lines = list(self._lines_for(size.columns - 1))[: max(1, size.lines // _LARGEST_SHARE)]
        self._start_restore_shell()
        self._write(self._reserved(size, len(lines), redraw) + self._filled(lines))

    def close(self, last_lines: Sequence[str] = ()) -> None:
        """Release the rows, and print these lines where the script's output ended."""
        if _in_foreground(self._descriptor):
            width = os.get_terminal_size(self._descriptor).columns
            erased = self._filled([]) if self._size else _ERASE_BELOW
            given_back = erased + _SAVE + _WHOLE_SCREEN + _RESTORE if self._rows else ""
            # Blanks as wide as the line wrap to the next line, unless the cursor was at the start of its own: an
            # unfinished progress bar is not overwritten.
            self._write(given_back + "".join(" " * width + f"\r{_ERASE_LINE}{line}\r\n" for line in last_lines))
        self._rows, self._size = 0, None
        self._end_restore_shell()

    def _reserved(self, size: os.terminal_size, rows: int, redraw: bool) -> str:
        """The escape sequence that reserves this many rows; empty if they are reserved."""
        if size == self._size and rows <= self._rows and not redraw:
            return ""
        moved = self._size is None or size != self._size or redraw
        self._size, self._rows = size, max(rows, 0 if moved else self._rows)
        # After a resize, the terminal has moved the old rows below the cursor, where nothing else is.
        start = _SAVE + _WHOLE_SCREEN + _RESTORE + (_ERASE_BELOW if moved else "")
        room = _DOWN * self._rows + f"\x1b[{self._rows}A"
        return f"{start}{room}{_SAVE}\x1b[1;{size.lines - self._rows}r{_RESTORE}"

    def _filled(self, lines: Sequence[str]) -> str:
        if self._size is None:
            return ""
        top = self._size.lines - self._rows + 1
        padded = [*lines[: self._rows], *[""] * (self._rows - len(lines))]
        rows = "".join(f"\x1b[{top + index};1H\x1b[0m{_ERASE_LINE}{line}" for index, line in enumerate(padded))
        return f"{_SAVE}{rows}\x1b[0m{_RESTORE}"

    def _write(self, text: str) -> None:
        """Write everything, in one call unless the terminal accepts less."""
        data = text.encode(self._encoding, "replace")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _start_restore_shell(self) -> None:
        """Start the shell that releases the rows if this process is killed.

        It is not a child process: nothing waits for it.
        """
        if self._restore_pipe is not None:
            return
        reading, self._restore_pipe = os.pipe()
        try:
            subprocess.run(
                ["/bin/sh", "-c", _RESTORE_SHELL],
                stdin=reading,
                stdout=self._descriptor,
                stderr=subprocess.DEVNULL,
                check=False,
                timeout=5,
            )
        except (OSError, subprocess.SubprocessError):
            pass  # no shell: a killed run leaves its last lines on the screen, and `reset` removes them
        finally:
            os.close(reading)

    def _end_restore_shell(self) -> None:
        if self._restore_pipe is None:
            return
        try:
            os.write(self._restore_pipe, b"done\n")
        except OSError:
            pass  # it has already ended
        finally:
            os.close(self._restore_pipe)
            self._restore_pipe = None
