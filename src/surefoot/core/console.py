"""The consoles that results and progress are printed to.

Names, paths and messages of users are printed as they are: rich must not turn `:100:` into an emoji, so no console has
emoji on. Texts may have rich's markup, such as `[bold]`; what comes from users is escaped by whoever prints it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def result_console(plain_width: int = 160) -> Console:
    """A console for results on stdout; where it is no terminal, lines have `plain_width` columns."""
    from rich.console import Console

    console = Console(emoji=False)
    return console if console.is_terminal else Console(width=plain_width, emoji=False)


def progress_bar() -> Progress:
    """A bar on stderr that is gone at the end, with the description of its task beside it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    description = TextColumn("{task.description}", markup=False)
    columns = (description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True, emoji=False), transient=True)
