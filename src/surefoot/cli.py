"""The command line: the commands of `surefoot.commands`, and what they share.

Nothing heavy is imported until a command needs it, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import NoReturn

import typer

import surefoot
from surefoot.commands import experiments, recorded_run
from surefoot.commands.checkpoints import app as checkpoints
from surefoot.commands.demo import demo
from surefoot.commands.doctor import doctor
from surefoot.commands.explain import explain
from surefoot.commands.zoo import app as zoo
from surefoot.core.console import wrapped_for
from surefoot.errors import UsageError

app = typer.Typer(
    help="Keep PyTorch training stable: guard a run, and find out why it fails.",
    rich_markup_mode=None,  # the pretty help takes as long to import as everything else
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(zoo, name="zoo")
app.add_typer(checkpoints, name="checkpoints")
# The exceptions of the parser, which depend on the release of typer.
_Misuse: type[Exception] = typer.BadParameter.__bases__[0]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command line. Wrong use prints one line on stderr and exits with code 2."""
    try:
        code = app(arguments, prog_name="surefoot", standalone_mode=False)
    except (_Misuse, UsageError) as error:
        words = error.format_message() if hasattr(error, "format_message") else str(error)
        context = getattr(error, "ctx", None)
        end = "" if words.rstrip().endswith((".", "?")) else "."
        way_out = f"{end} See `{context.command_path} --help`." if context is not None else ""
        typer.echo(wrapped_for(sys.stderr, f"surefoot: {' '.join(words.split())}{way_out}"), err=True)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


@app.callback(invoke_without_command=True)
def _surefoot(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    """Keep PyTorch training stable: guard a run, and find out why it fails."""
    if version:
        typer.echo(f"surefoot {surefoot.__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run an unmodified script, observe it, diagnose it.",
)
def run(
    script: str = typer.Argument(
        metavar="SCRIPT", help="The script, or with -m a module. Arguments after it are passed to it."
    ),
    arguments: list[str] | None = typer.Argument(None, metavar="ARGS", help="The script's own arguments."),
    out: Path | None = typer.Option(None, help="The run folder to create (default: runs/SCRIPT-DATE-TIME)."),
    guard: bool = typer.Option(
        False, "--guard", help="Also protect the weights: skip steps with a non-finite loss or gradient."
    ),
    progress: bool = typer.Option(False, "--progress", help="Show the progress of training on stderr."),
    tensorboard: Path | None = typer.Option(None, help="Also write the curves to this folder for TensorBoard."),
    webhook_env: str | None = typer.Option(
        None, metavar="NAME", help="Send alerts to the URL in this environment variable."
    ),
    heartbeat: float | None = typer.Option(
        None, metavar="SECONDS", help="Also send a heartbeat there at this interval, while the run makes steps."
    ),
    eager_looks: bool = typer.Option(
        False,
        "--eager-looks",
        help="Run compiled models eagerly in sampled steps, to observe operations. Results change in the last bits.",
    ),
    module: bool = typer.Option(False, "-m", help="Run a module, as `python -m` does."),
) -> None:
    """Run an unmodified PyTorch script, observe it, and print a diagnosis to stderr at the end."""
    # Only the help comes from here: `surefoot.__main__` handles everything else before this file is imported.
    from surefoot.commands.run import main as launch

    before = [
        *(["--out", str(out)] if out else []),
        *(["--guard"] if guard else []),
        *(["--progress"] if progress else []),
        *(["--tensorboard", str(tensorboard)] if tensorboard else []),
        *(["--webhook-env", webhook_env] if webhook_env else []),
        *(["--heartbeat", str(heartbeat)] if heartbeat is not None else []),
        *(["--eager-looks"] if eager_looks else []),
        *(["-m"] if module else []),
    ]
    launch([*before, script, *(arguments or [])])


app.command(short_help="List the runs below a directory, with their verdicts.")(recorded_run.runs)
app.command(short_help="Diagnose a recorded run, with evidence.")(recorded_run.diagnose)
app.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Find the single change that cures a failing script.",
)(experiments.bisect)
app.command()(recorded_run.watch)
app.command(short_help="Write one HTML page about a run; it works offline.")(recorded_run.report)
app.command()(recorded_run.serve)
app.command(short_help="Train with four injected faults, with and without the guard.")(demo)
app.command(short_help="Check a training set-up before it runs.")(doctor)
app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    short_help="Run a captured step again bit for bit, and find its cause.",
)(experiments.replay)
app.command(short_help="Explain a cause: symptom, evidence and fixes.")(explain)
