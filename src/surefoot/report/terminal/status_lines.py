"""A few lines at the bottom of the terminal that stay where they are, whatever else is written.

A training script prints, logs, shows a tqdm bar; C++ libraries and data-loader workers write straight to the terminal.
Nothing in this process can see all of that, so lines that are rewritten above or below the cursor get mixed up with it
sooner or later, and replacing `sys.stdout` changes the script. Here the terminal keeps them separate: its scrolling
region is made shorter, everything that is written moves within it, and the rows below belong to these lines. Each
drawing is one write that saves the cursor, fills the rows and puts the cursor back.

The cursor is never hidden. `close` gives the rows back. A process that is killed cannot do that, so a small shell waits
for its end and does it then. Where there is no such terminal (none at all, Windows, an interactive session, a
job in the background, a screen of a few rows), `terminal_of` says so and plain lines are written instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_WHOLE_SCREEN = "\x1b[r"
_ERASE_BELOW, _ERASE_LINE = "\x1b[J", "\x1b[2K"
_DOWN = "\x1bD"  # like a line end, but it keeps the column; at the last row it scrolls
_FEWEST_ROWS = 8
_LARGEST_SHARE = 3
"""The lines take at most one row in so many."""
# The trap: Ctrl-C reaches every process of the terminal, and this one has to outlive the others. A line on the pipe
# says that all is well; the end of the pipe without one says that the process is gone.
_RESTORE_SHELL = r"""exec 3<&0; (trap '' INT TERM HUP QUIT TTOU; read word <&3 || printf '\0337\033[r\0338\033[J') &"""


def terminal_of(stream: Any) -> int | None:
    """The descriptor of the terminal behind a stream, if status lines can be drawn there by this process."""
    try:
        if os.name != "posix" or not stream.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
            return None
        if hasattr(sys, "ps1"):  # an interactive session: the rows would stay, and its prompt counts on all of them
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
    except OSError:  # this process has a session of its own: the terminal belongs to another one
        return False


class StatusLines:
    """The rows at the bottom of one terminal. `draw` and `close` are called by one thread at a time."""

    def __init__(self, descriptor: int, encoding: str, lines_for: Callable[[int], Sequence[str]]) -> None:
        self._descriptor = descriptor
        self._encoding = encoding
        self._lines_for = lines_for
        """The lines for a width, with escapes for their colours but none that move the cursor."""
        self._size: os.terminal_size | None = None
        self._rows = 0
        self._restore_pipe: int | None = None

    def draw(self, redraw: bool = False) -> None:
        """Show the lines as they are now. `redraw`: other programs may have used the terminal in the meantime."""
        if not _in_foreground(self._descriptor):
            self._size = None  # stopped or sent to the background: the terminal is not ours until we are back
            return
        size = os.get_terminal_size(self._descriptor)
        if size.lines <= _LARGEST_SHARE:
            return
        lines = list(self._lines_for(size.columns - 1))[: max(1, size.lines // _LARGEST_SHARE)]
        self._start_restore_shell()
        self._write(self._reserved(size, len(lines), redraw) + self._filled(lines))

    def close(self, last_lines: Sequence[str] = ()) -> None:
        """Give the rows back, and leave these lines where the script's own output ended."""
        if _in_foreground(self._descriptor):
            width = os.get_terminal_size(self._descriptor).columns
            erased = self._filled([]) if self._size else _ERASE_BELOW
            given_back = erased + _SAVE + _WHOLE_SCREEN + _RESTORE if self._rows else ""
            # As many blanks as the line is wide end on the next line, unless the cursor was at the start of its own:
            # what a progress bar left unfinished is not written over.
            self._write(given_back + "".join(" " * width + f"\r{_ERASE_LINE}{line}\r\n" for line in last_lines))
        self._rows, self._size = 0, None
        self._end_restore_shell()

    def _reserved(self, size: os.terminal_size, rows: int, redraw: bool) -> str:
        """What makes room for so many rows; nothing if there is."""
        if size == self._size and rows <= self._rows and not redraw:
            return ""
        moved = self._size is None or size != self._size or redraw
        self._size, self._rows = size, max(rows, 0 if moved else self._rows)
        # After a resize the terminal has put the old rows somewhere below the cursor, where nothing else is.
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

    def _write(self, words: str) -> None:
        """All of it, in one piece unless the terminal takes less."""
        data = words.encode(self._encoding, "replace")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _start_restore_shell(self) -> None:
        """Start the shell that gives the rows back if this process is killed. It is no child: nothing waits for it."""
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
            pass  # it is gone already
        finally:
            os.close(self._restore_pipe)
            self._restore_pipe = None
