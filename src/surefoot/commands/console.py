"""The console that commands print results to."""

from __future__ import annotations

from rich.console import Console


def result_console() -> Console:
    """A console for results; where there is no terminal, lines are as long as they need to be."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
