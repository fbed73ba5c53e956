"""`surefoot doctor TARGET`: check a training set-up before it runs."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout

import typer

from surefoot.errors import UsageError


def doctor(
    target: str = typer.Argument(
        metavar="TARGET",
        help="module:function or file.py:function that returns model, loader, loss_fn, optimizer; or a script.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
    seconds: float = typer.Option(60.0, min=1.0, help="Approximate time limit for all checks together."),
) -> None:
    """Check a training set-up before it runs, in about ten steps on copies. Exit code 1 if a check failed."""
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
        from surefoot.doctor.checks import show

        show(examination, result_console())
    raise typer.Exit(0 if examination.ok else 1)
