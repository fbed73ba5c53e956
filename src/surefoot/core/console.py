"""The consoles that results and progress are printed to.

Names, paths and messages of users are printed unchanged: rich must not turn `:100:` into an emoji, so no console has
emoji enabled. Texts may contain rich's markup, such as `[bold]`; the caller must escape text from users.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def result_console(plain_width: int = 160) -> Console:
    """A console for results on stdout; if it is not a terminal, lines have `plain_width` columns."""
    from rich.console import Console

    console = Console(emoji=False)
    return console if console.is_terminal else Console(width=plain_width, emoji=False)


def takes_colour(stream: TextIO) -> bool:
    """Whether colours may be written to the stream: a terminal that has them, and `NO_COLOR` is not set."""
    try:
        return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # none at all, or closed
        return False


def wrapped_for(stream: TextIO, text: str) -> str:
    """Text with line breaks where a terminal's lines end, indented as the line was; unchanged without a terminal."""
    try:
        if not stream.isatty():
            return text
    except (AttributeError, ValueError):  # none at all, or closed
        return text
    width = shutil.get_terminal_size().columns
    lines: list[str] = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()))
        fits = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines.extend(fits or [""])
    return "\n".join(lines)


def progress_bar() -> Progress:
    """A progress bar on stderr with the description of its task; it disappears at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    description = TextColumn("{task.description}", markup=False)
    columns = (description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True, emoji=False), transient=True)


def print_if_not_logged(logger: logging.Logger, message: str) -> None:
    """Print a message to stderr if the script has not configured logging: Python drops messages of level info then."""
    if not logger.hasHandlers() and logger.getEffectiveLevel() > logging.INFO:
        with suppress(Exception):  # stderr may be closed
            print(message, file=sys.stderr, flush=True)
