"""`surefoot demo`: train without faults, with four faults, and with four faults and the guard."""

from __future__ import annotations

from pathlib import Path

import typer


def demo(
    steps: int = typer.Option(400, min=180, help="Optimizer steps of each run."),
    seed: int = typer.Option(0, help="Seed for the data order and the weights."),
    out: Path = typer.Option(Path("runs/demo"), help="The folder for the script, the runs and the reports."),
) -> None:
    """Train a small transformer three times: without faults, with four faults, and with the same faults, guarded."""
    from surefoot.demo.command import run_demo
    from surefoot.demo.runs import DemoFailed

    try:
        run_demo(steps, seed, out)
    except DemoFailed as error:
        typer.echo(f"surefoot: {error}", err=True)
        raise typer.Exit(1) from None
