"""The consoles that results and progress are printed to.

Names, paths and messages of users are printed as they are: rich must not turn `:100:` into an emoji, so no console has
emoji on. Texts may have rich's markup, such as `[bold]`; what comes from users is escaped by whoever prints it.
"""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

    from rich.console import Console
    from rich.progress import Progress


def result_console(plain_width: int = 160) -> Console:
    """A console for results on stdout; where it is no terminal, lines have `plain_width` columns."""
    from rich.console import Console

    console = Console(emoji=False)
    return console if console.is_terminal else Console(width=plain_width, emoji=False)


def wrapped_for(stream: TextIO, words: str) -> str:
    """The words with line breaks where a terminal's lines end; unchanged if the stream is no terminal."""
    try:
        if not stream.isatty():
            return words
    except (AttributeError, ValueError):  # none at all, or closed
        return words
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False))


def progress_bar() -> Progress:
    """A bar on stderr that is gone at the end, with the description of its task beside it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    description = TextColumn("{task.description}", markup=False)
    columns = (description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True, emoji=False), transient=True)
