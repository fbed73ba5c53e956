"""`ProgressSink`: the sink that shows a run in the terminal from which it was started.

In a terminal, a few lines stay at the bottom (`status_lines.py` explains how they are kept separate from the script's
output). Elsewhere, in a log file, a pipe or a notebook, plain lines are printed at intervals. Both go to stderr, so
stdout contains only the script's output. Rows arrive about once a second; if none arrive, `tick` redraws, so that the
time advances and a hanging step is visible. All of this happens in the sink's own thread, never in the training loop.

With several ranks, only the first one prints. If the terminal fails, progress is no longer shown and training
continues.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from surefoot.errors import require
from surefoot.report.run_view import RunView
from surefoot.report.terminal.formatting import as_ascii
from surefoot.report.terminal.lines import can_show_blocks, rule, view_lines
from surefoot.report.terminal.plain import PlainLines, summary
from surefoot.report.terminal.status_lines import StatusLines, terminal_of

if TYPE_CHECKING:
    from surefoot.record.messages import Batch, Event

_logger = logging.getLogger("surefoot")
_LOCK_SECONDS = 1.0
_AWAY_SECONDS = 5.0
"""After this long without a redraw, the process or the machine was suspended: others may have used the terminal."""
_terminals_in_use: set[int] = set()


class ProgressSink:
    """Shows the progress of training. Pass one to the run log: `RunLog("runs/a", sinks=[ProgressSink()])`."""

    def __init__(self, *, total_steps: int | None = None, every_seconds: float = 10.0, stream: Any = None) -> None:
        """`total_steps` gives the remaining time; `every_seconds` is the interval of plain lines; the default stream is
        stderr.
        """
        require(total_steps is None or total_steps >= 1, f"`total_steps` must be at least 1; got {total_steps}.")
        require(every_seconds > 0, f"`every_seconds` must be greater than 0; got {every_seconds}.")
        self._view = RunView(total_steps=total_steps)
        self._stream = sys.stderr if stream is None else stream
        self._encoding: str = (
            getattr(self._stream, "encoding", None) or "utf-8"
        )  # text in memory has no encoding: it accepts everything
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
        """Add rows and events, and show the progress."""
        with self._lock:
            self._try(lambda: self._view.add(batch))
            # Findings are left to the diagnosis, which is printed afterwards with more detail.
            self._show([event for event in batch.events if event.event != "finding"])

    def tick(self) -> None:
        """Redraw if nothing has arrived for a second."""
        with self._lock:
            if self._begun:
                self._show()

    def close(self) -> None:
        """Release the terminal and print the final progress. A second call does nothing."""
        if self._over or os.getpid() != self._process:
            return
        self._over = True
        atexit.unregister(self._leave)
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            return  # the terminal does not accept output (Ctrl-S): do not delay the end of the run
        try:
            self._try(self._end)
        finally:
            self._lock.release()

    def _leave(self) -> None:
        """Called at exit. The log may still write to this sink and close it afterwards."""
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
        text = f"surefoot: {summary(self._view, now, at_end=True)}"
        self._status.close([as_ascii(text) if self._ascii else text] if self._view.started is not None else [])
        _terminals_in_use.discard(self._terminal if self._terminal is not None else -1)

    def _try(self, work: Callable[[], None]) -> None:
        """Call `work`. If it fails, warn once and show nothing from then on."""
        try:
            work()
        except Exception as error:
            self._silent = True
            with suppress(OSError, ValueError):
                if self._status is not None:
                    self._status.close()  # stale rows would look like a stalled run
            _logger.warning(
                "progress is no longer shown (%s: %s); training continues, and the run log is still written",
                type(error).__name__,
                error,
            )


def as_escapes(lines: Sequence[Any]) -> list[str]:
    """Styled lines as strings with escape sequences, with the colours that the environment supports."""
    from rich.console import Console

    # Lines have their own width; the console only converts styles to escape sequences.
    console = Console(force_terminal=True, width=1000, height=100, legacy_windows=False, emoji=False)
    strings = []
    for line in lines:
        with console.capture() as capture:
            console.print(line, end="", soft_wrap=True)
        strings.append(capture.get())
    return strings


def _line_start() -> str:
    """A line end if a tqdm bar may have left its line open."""
    bar: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return "\n" if len(getattr(bar, "_instances", ())) else ""
