"""The figures of mutants in the terminal.

Of the testing half only totals are printed: reading its single results while changing rules would be tuning on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.core.wording import count_of
from surefoot.zoo.mutation.figures import FEWEST_SEEDS, Figures, JudgedMutant, figures

if TYPE_CHECKING:
    from surefoot.zoo.mutation.runs import MutantRun

_MOST_CONFUSIONS = 25


def show(half: str, judged: list[JudgedMutant], console: Any) -> None:
    """Print the figures of one half; of the tuning half also the runs that missed."""
    held = figures(judged)
    _show_totals(half, judged, held, console)
    _show_operators(held, console)
    _show_reliability(held, console)
    if held.confusions:
        console.print("\n[bold]confusions[/bold] (truth -> named first)")
        for truth, named, count in held.confusions[:_MOST_CONFUSIONS]:
            _line(console, f"  {truth} -> {named}  ×{count}")
    if half == "tuning":
        _show_runs(judged, console)


def _show_totals(half: str, judged: list[JudgedMutant], held: Figures, console: Any) -> None:
    seeds = {len(each.runs) for each in judged}
    counts = f"{count_of(held.top1.mutants, 'faulty mutant')}, {count_of(held.top1.runs, 'run')}"
    console.print(f"\n[bold]{half}[/bold]: {counts}", highlight=False)
    _line(console, f"  true cause first            {held.top1}")
    _line(console, f"  among the first three       {held.top3}")
    _line(console, f"  no finding, but mentioned   {held.mentioned}")
    quiet, parents = held.false_quiet, held.false_parents
    _line(
        console,
        f"  false findings: in {quiet.hits} of {count_of(quiet.runs, 'run')} of mutants that do no harm, of which "
        f"there are {quiet.mutants} ({held.planted} of them name the planted cause alone); in {parents.hits} of "
        f"{count_of(parents.runs, 'run')} of healthy parents, of which there are {parents.mutants}",
    )
    for reason, count in held.left_out:
        _line(console, f"  left out: {count_of(count, 'mutant')} ({reason})")
    if min(seeds, default=0) < FEWEST_SEEDS:
        _line(console, f"  Whether a mutant does worse than its parent needs {FEWEST_SEEDS} seeds of both.")


def _show_operators(held: Figures, console: Any) -> None:
    from rich.table import Table

    if not held.operators:
        return
    console.print("\n[bold]operators[/bold] (share of runs, 95 % interval over mutants)")
    table = Table(
        "operator", "faulty", "first", "first three", "mentioned", "quiet", "left out", box=None, pad_edge=False
    )
    for row in held.operators:
        name = row.operator if row.strength is None else f"  at {row.strength:g}"
        shares = row.top1, row.top3, row.mentioned
        table.add_row(name, str(row.top1.mutants), *map(str, shares), str(row.quiet), str(row.left_out))
    console.print(table)


def _show_reliability(held: Figures, console: Any) -> None:
    from rich.table import Table

    if not held.reliability:
        return
    console.print("\n[bold]reliability[/bold] (all findings above info; a finding on a quiet mutant is wrong)")
    table = Table("confidence", "findings", "mean confidence", "accuracy", box=None, pad_edge=False)
    for each in held.reliability:
        bounds = f"{each.low:.2f} to {each.high:.2f}"
        table.add_row(bounds, str(each.findings), f"{each.confidence:.3f}", f"{each.accuracy:.3f}")
    console.print(table)


def _show_runs(judged: list[JudgedMutant], console: Any) -> None:
    missed = [
        run for held in judged if held.counts_as == "faulty" for run in held.runs if held.true.isdisjoint(run.named[:1])
    ]
    false = [run for held in judged if held.counts_as == "quiet" for run in held.runs if run.serious]
    for title, runs in (("runs that missed", missed), ("false findings", false)):
        if runs:
            console.print(f"\n[bold]{title}[/bold]")
            for run in runs:
                _line(console, f"  {_name(run)} -> {_said(run)}")


def _name(run: MutantRun) -> str:
    strength = "" if run.strength is None else f"@{run.strength:g}"
    return f"{run.operator or 'healthy'}{strength} on {run.parent}:{run.seed}"


def _said(run: MutantRun) -> str:
    if run.trouble:
        return run.trouble
    causes = ", ".join(f"{each.cause} {each.confidence:.2f}" for each in (run.serious or run.findings)[:3])
    return causes or f"({run.verdict})"


def _line(console: Any, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
