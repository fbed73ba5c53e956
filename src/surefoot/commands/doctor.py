"""`surefoot doctor TARGET`: examine a training setup before it runs."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout

import typer

from surefoot.errors import UsageError


def doctor(
    target: str = typer.Argument(
        help="module:function or file.py:function; returns model, loader, loss_fn, optimizer."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
    seconds: float = typer.Option(60.0, min=1.0, help="Time that all probes share, roughly."),
) -> None:
    """Examine a training setup before it runs: ten steps, nothing changed. Exit code 1 if a check failed."""
    from surefoot.doctor.target import examine_target
    from surefoot.errors import SurefootError

    try:
        with redirect_stdout(sys.stderr):  # what the user's code prints must not get between the results
            examination = examine_target(target, seconds)
    except SurefootError as error:
        raise UsageError(" ".join(str(error).split())) from None
    if as_json:
        typer.echo(json.dumps(examination.to_dict(), indent=2))
    else:
        from surefoot.core.console import result_console
        from surefoot.doctor.terminal import show

        show(examination, result_console())
    raise typer.Exit(0 if examination.ok else 1)
