"""`surefoot demo`, from beginning to end."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from surefoot.core.console import result_console
from surefoot.demo.cost import measure_cost
from surefoot.demo.results import diagnosis, fault_table, faults_of, outcome_table, verdict
from surefoot.demo.runs import DemoRun, collect, prepare, under_way
from surefoot.report.page.html import write_report

if TYPE_CHECKING:
    import subprocess

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


def _print(console: Console, text: str, indent: int = 0, style: str = "") -> None:
    console.print(Padding(Text(text, style), (0, 0, 0, indent)))


def _head(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]", highlight=False)


_BLOCKS = "▁▂▃▄▅▆▇█"
_LOWEST, _HIGHEST = 1.5, 7.5
"""The range of losses that the blocks cover: from a trained model to one that has diverged."""
_BESIDE = 32
"""Width of the numbers beside the curve, in columns."""
_REPORTS = 4
"""Plain lines for each run."""


def follow(
    console: Console, runs: list[DemoRun], processes: list[subprocess.Popen[str]], steps: int, faults: list[int]
) -> None:
    """Show the runs until the last of them has ended."""
    if not console.is_terminal:
        _follow_in_lines(console, runs, processes, steps)
        return
    with Live(_picture(console, runs, steps, faults), console=console, refresh_per_second=8) as live:
        while any(process.poll() is None for process in processes):
            time.sleep(0.1)
            live.update(_picture(console, runs, steps, faults))


def _follow_in_lines(console: Console, runs: list[DemoRun], processes: list[subprocess.Popen[str]], steps: int) -> None:
    told = dict.fromkeys((run.name for run in runs), 0)
    over = False
    while not over:
        over = all(process.poll() is not None for process in processes)
        for run in runs:
            done = len(run.losses)
            if done * _REPORTS // steps > told[run.name]:
                told[run.name] = done * _REPORTS // steps
                console.print(f"  {run.name}: step {done} of {steps}, loss {run.losses[-1]:.2f}", highlight=False)
        time.sleep(0.1)


def _picture(console: Console, runs: list[DemoRun], steps: int, faults: list[int]) -> Table:
    width = max(10, min(80, console.width - _BESIDE))
    table = Table.grid(padding=(0, 2))
    table.add_row("", _marks(faults, steps, width), "", "", style="yellow")
    for run in runs:
        last = run.losses[-1] if run.losses else None
        loss = "starting" if last is None else f"loss {last:.2f}"
        style = "bold red" if last is not None and not math.isfinite(last) else ""
        table.add_row(run.name, curve(run.losses, steps, width), f"{len(run.losses)}/{steps}", Text(loss, style))
    return table


def curve(losses: list[float], steps: int, width: int) -> Text:
    """One column for every few steps, as high as their highest loss; a cross if a loss is not finite."""
    drawn = Text()
    for column in range(width):
        some = losses[column * steps // width : max((column + 1) * steps // width, column * steps // width + 1)]
        if not some:
            drawn.append(" ")
        elif not all(map(math.isfinite, some)):
            drawn.append("×", "red")
        else:
            height = (max(some) - _LOWEST) / (_HIGHEST - _LOWEST)
            drawn.append(_BLOCKS[max(0, min(len(_BLOCKS) - 1, int(height * len(_BLOCKS))))], "cyan")
    return drawn


def _marks(faults: list[int], steps: int, width: int) -> Text:
    """Numbers above the columns at which a fault occurs."""
    line = [" "] * width
    for number, step in enumerate(faults, 1):
        line[step * width // steps] = str(number)
    return Text("".join(line))
