"""The command line. Nothing heavy is imported until a command needs it, so that `--help` answers at once."""

from __future__ import annotations

import typer

app = typer.Typer(
    help="Keeps PyTorch training on its feet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _surefoot() -> None:
    """Keeps PyTorch training on its feet."""


@app.command()
def demo(
    steps: int = typer.Option(400, min=50, help="Optimizer steps of each run."),
    seed: int = typer.Option(0, help="Seed of the data order and the weights."),
) -> None:
    """Train a digit classifier three ways: clean, with faults, and with the same faults guarded."""
    from surefoot.demo import run_demo

    run_demo(steps, seed)
