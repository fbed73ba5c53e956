"""`ProgressSink`: the sink that shows a run in the terminal it was started from.

In a terminal, a few lines stay at the bottom (`status_lines.py` says how they keep clear of the script's own output);
elsewhere, in a log file, a pipe or a notebook, plain lines are printed at intervals. Both go to stderr, so the bytes
on stdout are the script's own. Rows arrive about once a second; where none come, `tick` redraws, so that the time
moves on and a step that hangs is visible. All of it happens in the sink's own thread, never in the training loop.

Under several ranks only the first one prints. If the terminal fails, progress is no longer shown and training goes on.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from surefoot.errors import require
from surefoot.report.run_view import RunView
from surefoot.report.terminal.formatting import as_ascii
from surefoot.report.terminal.lines import can_show_blocks, rule, view_lines
from surefoot.report.terminal.plain import PlainLines, summary
from surefoot.report.terminal.status_lines import StatusLines, terminal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from surefoot.record.messages import Batch, Event

_logger = logging.getLogger("surefoot")
_LOCK_SECONDS = 1.0
_AWAY_SECONDS = 5.0
"""After so long without a drawing the process was stopped, or the machine asleep: others may have used the terminal."""
_terminals_in_use: set[int] = set()


class ProgressSink:
    """Shows how training goes: pass one to the run log, `RunLog("runs/a", sinks=[ProgressSink()])`."""

    def __init__(self, *, total_steps: int | None = None, every_seconds: float = 10.0, stream: Any = None) -> None:
        """Total steps, if known, give the remaining time; `every_seconds` is for plain lines; the stream is stderr."""
        require(total_steps is None or total_steps >= 1, f"`total_steps` must be at least 1; got {total_steps}.")
        require(every_seconds > 0, f"`every_seconds` must be greater than 0; got {every_seconds}.")
        self._view = RunView(total_steps=total_steps)
        self._stream = sys.stderr if stream is None else stream
        self._encoding: str = (
            getattr(self._stream, "encoding", None) or "utf-8"
        )  # text in memory has none: it takes all
        self._ascii = not can_show_blocks(self._encoding)
        self._plain = PlainLines(every_seconds, self._ascii)
        self._status: StatusLines | None = None
        self._terminal: int | None = None
        self._silent = self._stream is None or os.environ.get("RANK", "0") not in ("", "0")
        self._begun = False
        self._drawn_at = 0.0
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._over = False
        self._leaving = False
        atexit.register(self._leave)

    def write(self, batch: Batch) -> None:
        """Take rows and events in, and show where the run is."""
        with self._lock:
            self._try(lambda: self._view.add(batch))
            # What was found at the end is left to the diagnosis, which follows and says more.
            self._show([event for event in batch.events if event.event != "finding"])

    def tick(self) -> None:
        """Nothing has come for a second: show that time passes."""
        with self._lock:
            if self._begun:
                self._show()

    def close(self) -> None:
        """Give the terminal back and print how far the run came. A second call does nothing."""
        if self._over or os.getpid() != self._process:
            return
        self._over = True
        atexit.unregister(self._leave)
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            return  # the terminal takes nothing in (Ctrl-S): do not hold up the end of the run for it
        try:
            self._try(self._end)
        finally:
            self._lock.release()

    def _leave(self) -> None:
        """The program ends. The log may still write and close this sink afterwards, or not: both work."""
        if self._over or os.getpid() != self._process or not self._lock.acquire(timeout=_LOCK_SECONDS):
            return
        try:
            self._leaving = True
            if self._status is not None:
                self._try(self._status.close)
        finally:
            self._lock.release()

    def _show(self, events: Sequence[Event] = ()) -> None:
        if self._silent or self._over:
            return
        if not self._begun:
            self._begun = True
            self._try(self._begin)
        if self._status is not None:
            if not self._leaving:
                self._try(self._draw)
        else:
            self._try(lambda: self._print(self._plain.lines(self._view, events, time.time())))

    def _begin(self) -> None:
        terminal = terminal_of(self._stream)
        if terminal is not None and terminal not in _terminals_in_use:
            _terminals_in_use.add(terminal)
            self._terminal = terminal
            self._status = StatusLines(terminal, self._encoding, self._lines)

    def _draw(self) -> None:
        assert self._status is not None
        now = time.monotonic()
        self._status.draw(redraw=now - self._drawn_at > _AWAY_SECONDS)
        self._drawn_at = now

    def _lines(self, width: int) -> list[str]:
        lines = view_lines(self._view, time.time(), width, events=1, ascii_only=self._ascii)
        return as_escapes([*rule("surefoot", width, self._ascii), *lines])

    def _print(self, lines: Sequence[str]) -> None:
        if lines:
            self._stream.write(_line_start() + "\n".join(lines) + "\n")
            self._stream.flush()

    def _end(self) -> None:
        if self._silent:
            return
        now = time.time()
        if self._status is None:
            self._print(self._plain.last_line(self._view, now))
            return
        words = f"surefoot: {summary(self._view, now, at_end=True)}"
        self._status.close([as_ascii(words) if self._ascii else words] if self._view.started is not None else [])
        _terminals_in_use.discard(self._terminal if self._terminal is not None else -1)

    def _try(self, work: Callable[[], None]) -> None:
        """Do it; if it fails, warn once and show nothing from then on."""
        try:
            work()
        except Exception as error:
            self._silent = True
            with suppress(OSError, ValueError):
                if self._status is not None:
                    self._status.close()  # rows that no longer move would look like a run that no longer moves
            _logger.warning(
                "progress is no longer shown (%s: %s); training continues, and the run log is still written",
                type(error).__name__,
                error,
            )


def as_escapes(lines: Sequence[Any]) -> list[str]:
    """Styled lines as strings with the escapes for their colours, as many as the environment asks for."""
    from rich.console import Console

    # The size is the lines' own affair; the console is only there to turn styles into escapes.
    console = Console(force_terminal=True, width=1000, height=100, legacy_windows=False, emoji=False)
    strings = []
    for line in lines:
        with console.capture() as capture:
            console.print(line, end="", soft_wrap=True)
        strings.append(capture.get())
    return strings


def _line_start() -> str:
    """A line end if a tqdm bar may have left its line open, as it does until it is done."""
    bar: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return "\n" if len(getattr(bar, "_instances", ())) else ""
