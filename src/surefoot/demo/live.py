"""The three runs in progress: curves on one scale, or a few plain lines if there is no terminal."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import subprocess

    from rich.console import Console

    from surefoot.demo.runs import DemoRun

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
