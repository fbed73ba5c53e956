"""The experiments in the terminal: progress while they run, then the table and the conclusion."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from surefoot.core.console import progress_bar

if TYPE_CHECKING:
    from rich.console import Console

    from surefoot.experiments.results import Report, Row

_MARKS = {"cures": "bold green", "does not": "red", "fails": "red", "healthy": "green", "tells": "cyan"}


@contextmanager
def progress(total: int, budget_s: float) -> Iterator[Callable[[str, str], None]]:
    """Show the beginning and the end of each run: a live line in a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield _print_line
        return
    with progress_bar() as bar:
        task = bar.add_task("baseline", total=total)
        running: list[str] = []

        def on_event(name: str, words: str) -> None:
            if words:
                running.remove(name)
                bar.console.print(f"{name}  {words}", highlight=False, markup=False)
            else:
                running.append(name)
            shown = f"{', '.join(running)} · {budget_s:g} s at most"
            bar.update(task, description=shown[-60:], advance=1 if words else 0)

        yield on_event


def _print_line(name: str, words: str) -> None:
    if words:
        print(f"surefoot: {name}: {words}", file=sys.stderr, flush=True)


def show(report: Report, folder: str, console: Console) -> None:
    """Print the report."""
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    table = Table("change", "outcome", "final loss", "steps", "failed at", "cures it?", box=None, pad_edge=False)
    for row in report.rows:
        mark = _MARKS.get(row.verdict)
        verdict = f"[{mark}]{row.verdict}[/{mark}]" if mark else f"[dim]{row.verdict}[/dim]"
        table.add_row(*_cells(row), verdict + (f": {escape(_why(row))}" if _why(row) else ""))
    console.print(table, highlight=False)
    console.print(f"\n[bold]{escape(_capital(report.sentence))}[/bold]", highlight=False)
    for words in report.conclusions:
        console.print(escape(words), highlight=False)
    if report.confirms:
        console.print(f"This confirms {', '.join(report.confirms)}.", highlight=False)
    elif report.guesses:
        console.print(f"This suggests {', '.join(report.guesses[:4])}.", highlight=False)
    for words in _findings(report):
        console.print(Padding(escape(words.lstrip()), (0, 0, 0, len(words) - len(words.lstrip()))), highlight=False)
    console.print(f"{report.seconds:.0f} s of {report.budget_s:g} s · {escape(folder)}", style="dim", highlight=False)


def _findings(report: Report) -> list[str]:
    """The findings, with the fix of the first one."""
    serious = [finding for finding in report.diagnosis.findings if finding.severity != "info"]
    lines = [f"  {finding.cause} · {finding.confidence:.2f} · {finding.summary}" for finding in serious[:3]]
    first = next((each for each in serious[:1] if not each.evidence.get("experiments", {}).get("refuted")), None)
    if first is not None:
        fix = [f"    Fix: {first.fixes[0]}"] if first.fixes else []
        lines[1:1] = [*fix, f"    surefoot explain {first.cause}"]
    elif report.guesses:
        lines.append(f"    surefoot explain {report.guesses[0]}")
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    held: Any = row.reading
    if held is None:
        return row.title, "", "", "", ""
    end = f"{held.end:.4g}" if math.isfinite(held.end) else "-"
    failed = "" if held.failed_at is None or not held.fails else f"{held.failed_at:,}"
    return row.title, held.outcome, end, f"{held.steps:,}", failed


def _why(row: Row) -> str:
    notes = f" ({'; '.join(row.notes)})" if row.notes else ""
    return f"{row.why}{notes}"


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
