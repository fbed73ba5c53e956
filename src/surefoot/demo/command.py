"""`surefoot demo`, from beginning to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from surefoot.demo.cost import measure_cost
from surefoot.demo.live import follow
from surefoot.demo.runs import collect, prepare, under_way
from surefoot.report.page import write_report

if TYPE_CHECKING:
    from pathlib import Path

COMPARED_STEPS = 40
"""Steps of each loop that the cost of a step is the median of."""
_PLAIN_WIDTH = 100


def run_demo(steps: int, seed: int, out: Path) -> None:
    """Train three ways, tell what came of it, write the reports. The last line is the path of the guarded run's."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    runs = prepare(out)
    _, bare, guarded = runs
    _say(
        console,
        f"A character transformer learns to write Python from the standard library's source: {steps} steps, three "
        f"times, side by side. Same seed, same data. In two of the runs four things go wrong.",
    )
    with under_way(runs, steps, seed, console.width) as processes:
        from surefoot.demo import story  # brings torch along, which takes as long here as in the runs

        faults = story.faults_of(steps)
        for number, fault in enumerate(faults, 1):
            console.print(f"  [yellow]{number}[/yellow] {fault.name}, at step {fault.steps.start}", highlight=False)
        console.print()
        follow(console, runs, processes, steps, [fault.steps.start for fault in faults])
    collect(runs, processes)
    with console.status("measuring what the guard costs"):
        cost = measure_cost(min(COMPARED_STEPS, steps // 8))

    console.print()
    console.print(story.outcome_table(runs, faults, cost))
    _say(
        console,
        f"{story.verdict(runs)} Bare is AdamW with clip_grad_norm_ at 1; guarded clips the same. A step: medians of "
        f"{cost.steps} steps of each loop in turns, no faults, one thread.",
    )
    console.print()
    console.print(story.fault_table(runs, faults))
    _head(console, "What the guard said")
    for incident in guarded.results["incidents"]:
        _say(console, f"  {incident['text']}")
    _head(console, "What is wrong with the bare run? It was started as")
    _say(console, f"  $ surefoot run --out {bare.folder} {out / 'train.py'} --faults")
    _say(console, "which changes nothing in the script, and says at its end:")
    console.print(story.diagnosis(bare), highlight=False, markup=False, soft_wrap=True)
    _head(console, "Yours: `surefoot run train.py`, or a TrainingStabilizer in your loop (README).")
    _say(console, "Reports to open in a browser, first the bare run's, then the guarded one's:")
    for run in (bare, guarded):
        print(write_report(run.folder))


def _say(console: Console, words: str) -> None:
    console.print(words, highlight=False, markup=False)


def _head(console: Console, words: str) -> None:
    console.print(f"\n[bold]{words}[/bold]", highlight=False)
