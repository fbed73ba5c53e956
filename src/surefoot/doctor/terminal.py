"""An examination as a table in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from surefoot.doctor.checks import STEPS, Check, Examination

if TYPE_CHECKING:
    from rich.console import Console


_COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


def show(examination: Examination, console: Console) -> None:
    """Print every check below its step, then the notes and a summary line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "status", "number", "result and fix"):
        table.add_column(column, no_wrap=column != "result and fix", overflow="fold")
    last = 0
    for check in examination.checks:
        if check.step != last:
            table.add_row(f"[bold]{check.step} {STEPS[check.step]}[/bold]")
            last = check.step
        table.add_row(f"  {check.name}", f"[{_COLOURS[check.status]}]{check.status}[/]", _number(check), _text(check))
    console.print(table)
    console.print()
    for note in examination.notes:
        console.print(note, markup=False, highlight=False)
    console.print(examination.verdict, highlight=False)
    if examination.causes:
        console.print(f"Details: surefoot explain {examination.causes[0]}", highlight=False)


def _number(check: Check) -> str:
    return "" if check.number is None else f"{check.number:.4g}"


def _text(check: Check) -> str:
    text = escape(check.summary)
    if check.fix:
        cause = f"[bold]{check.cause}[/bold]: " if check.cause else ""
        text += f"\n→ {cause}{escape(check.fix)}"
    return text
