"""`surefoot demo`, from beginning to end."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from surefoot.core.console import result_console
from surefoot.demo.cost import measure_cost
from surefoot.demo.live import follow
from surefoot.demo.results import diagnosis, fault_table, faults_of, outcome_table, verdict
from surefoot.demo.runs import DemoRun, collect, prepare, under_way
from surefoot.report.page.html import write_report

if TYPE_CHECKING:
    from rich.console import Console

    from surefoot.demo.cost import Cost
    from surefoot.demo.results import Fault

COMPARED_STEPS = 40
"""How many steps of each loop the median cost of a step is computed from."""
_PLAIN_WIDTH = 100
_IN_A_LOOP = "sf.TrainingStabilizer(...)"


def run_demo(steps: int, seed: int, out: Path) -> None:
    """Train the three runs, print the results and write the reports.

    The last line is the path of the guarded run's report.
    """
    console = result_console(_PLAIN_WIDTH)
    runs = prepare(out)
    faults = _train(console, runs, steps, seed)
    with console.status("measuring the cost of a guarded step"):
        cost = measure_cost(min(COMPARED_STEPS, steps // 8))
    _print_results(console, runs, faults, cost)
    _print_diagnosis(console, runs[1], steps, seed)
    _head(console, "Next: your own training")
    command = f"{_surefoot()} run train.py"
    width = max(len(command), len(_IN_A_LOOP))
    _print(console, f"{command:<{width}}  observe your script without changing it", indent=2)
    _print(console, f"{_IN_A_LOOP:<{width}}  protect your own loop; see the README", indent=2)
    _head(console, "Reports of the bare and of the guarded run, to open in a browser")
    for run in runs[1:]:
        print(write_report(run.folder))


def _train(console: Console, runs: list[DemoRun], steps: int, seed: int) -> list[Fault]:
    _print(
        console,
        f"A small transformer learns to write Python from the source of the standard library: three runs of {steps} "
        "steps in parallel, with the same seed and data. The bare and the guarded run have these faults:",
    )
    with under_way(runs, steps, seed, console.width) as processes:
        with console.status("starting"):
            faults = faults_of(steps)
        for number, fault in enumerate(faults, 1):
            console.print(f"  [yellow]{number}[/yellow] {fault.name}, step {fault.steps.start}", highlight=False)
        console.print()
        follow(console, runs, processes, steps, [fault.steps.start for fault in faults])
    collect(runs, processes)
    return faults


def _print_results(console: Console, runs: list[DemoRun], faults: list[Fault], cost: Cost) -> None:
    console.print()
    console.print(outcome_table(runs, faults, cost))
    _print(console, verdict(runs))
    _print(
        console,
        "Bare: AdamW and clip_grad_norm_ at 1. Guarded: the same, in a TrainingStabilizer with TrainingRecovery. Time "
        f"per step: median processor time of {cost.steps} steps without faults, both loops alternating.",
        style="dim",
    )
    _head(console, "Effect of each fault")
    console.print(fault_table(runs, faults))
    _head(console, "Log of the guarded run")
    for incident in runs[2].results["incidents"]:
        _print(console, incident["text"], indent=2)


def _print_diagnosis(console: Console, bare: DemoRun, steps: int, seed: int) -> None:
    _head(console, "Diagnosis of the bare run")
    _print(console, "The bare run was observed, without changing anything in it, with this command:")
    command = shlex.join(["surefoot", "run", "--out", str(bare.folder), *bare.words(steps, seed)])
    console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)  # to be copied: no line is cut
    _print(console, "It printed at the end:")
    console.print(diagnosis(bare), highlight=False, markup=False, soft_wrap=True)


def _surefoot() -> str:
    """The command to use here: its path if it is not on the PATH."""
    if shutil.which("surefoot") is not None:
        return "surefoot"
    beside = Path(sys.executable).with_name("surefoot")
    if not beside.exists():
        return f"{Path(sys.executable).name} -m surefoot"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def _print(console: Console, words: str, indent: int = 0, style: str = "") -> None:
    console.print(Padding(Text(words, style), (0, 0, 0, indent)))


def _head(console: Console, words: str) -> None:
    console.print(f"\n[bold]{words}[/bold]", highlight=False)
