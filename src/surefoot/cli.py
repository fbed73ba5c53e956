"""The command line. Nothing heavy is imported until a command needs it, so that `--help` answers at once."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

import surefoot
from surefoot.commands.zoo import app as zoo
from surefoot.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from surefoot.diagnose.catalogue import Cause

app = typer.Typer(
    help="Keeps PyTorch training on its feet.",
    add_completion=False,
    rich_markup_mode=None,  # the pretty help takes as long to import as all the rest
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(zoo, name="zoo")
# What the parser raises, wherever this release of typer keeps it.
_Misuse: type[Exception] = typer.BadParameter.__bases__[0]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Answer one command line. Wrong use is one line on stderr and exit code 2."""
    try:
        code = app(arguments, prog_name="surefoot", standalone_mode=False)
    except (_Misuse, UsageError) as error:
        words = error.format_message() if hasattr(error, "format_message") else str(error)
        context = getattr(error, "ctx", None)
        way_out = f" See `{context.command_path} --help`." if context is not None else ""
        typer.echo(f"surefoot: {' '.join(words.split())}{way_out}", err=True)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


@app.callback(invoke_without_command=True)
def _surefoot(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    """Keeps PyTorch training on its feet."""
    if version:
        typer.echo(f"surefoot {surefoot.__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a script unmodified, watch it, diagnose it.",
)
def run(
    script: str = typer.Argument(help="The script, or with -m a module. What follows it belongs to it."),
    arguments: list[str] | None = typer.Argument(None, metavar="[ARGS]...", help="The script's own arguments."),
    out: Path | None = typer.Option(None, help="Where the run folder goes (default: runs/SCRIPT-DATE-TIME)."),
    guard: bool = typer.Option(False, "--guard", help="Also protect: a step with non-finite gradients is not applied."),
    progress: bool = typer.Option(False, "--progress", help="Show on stderr how training goes."),
    module: bool = typer.Option(False, "-m", help="Run a module, as `python -m` does."),
) -> None:
    """Run a PyTorch script unmodified, watch it, and end with a diagnosis on stderr."""
    # Only the help comes from here: `surefoot.__main__` answers everything else before this file is even imported.
    from surefoot.commands.run import main as launch

    before = [
        *(["--out", str(out)] if out else []),
        *(["--guard"] if guard else []),
        *(["--progress"] if progress else []),
        *(["-m"] if module else []),
    ]
    launch([*before, script, *(arguments or [])])


@app.command()
def diagnose(
    folder: Path = typer.Argument(help="A run folder, as `surefoot run --out DIR` leaves one."),
    json: bool = typer.Option(False, "--json", help="As JSON on stdout, for other programs."),
) -> None:
    """Say what was wrong with a recorded run, with all the evidence."""
    from surefoot.diagnose.engine import diagnose as judge
    from surefoot.diagnose.engine import load
    from surefoot.diagnose.terminal import as_full_text
    from surefoot.record.run_folder import as_json

    facts, run = load(folder)
    diagnosis = judge(facts, run)
    typer.echo(as_json(diagnosis.as_json(), indent=2) if json else as_full_text(diagnosis, str(folder)))
    if not json and "exit_code" in run and run["exit_code"] is None:
        typer.echo(
            f"  the run did not end (killed, or still going): judged by what was saved at step {diagnosis.steps:,}"
        )


@app.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Find the single change that cures a failing script.",
)
def bisect(
    script: str = typer.Argument(help="The script, or with -m a module. What follows it belongs to it."),
    arguments: list[str] | None = typer.Argument(None, metavar="[ARGS]...", help="The script's own arguments."),
    budget: float = typer.Option(600.0, min=1.0, help="Seconds that all runs together may take, by the clock."),
    jobs: int = typer.Option(0, min=0, help="Runs at the same time (default: half of the cores; 1 with a GPU)."),
    out: Path | None = typer.Option(None, help="Where everything goes (default: runs/bisect-SCRIPT-DATE-TIME)."),
    only: str = typer.Option("", help="Only these changes, with commas between, such as lr-3,clip,fp32."),
    module: bool = typer.Option(False, "-m", help="Run a module, as `python -m` does."),
    json: bool = typer.Option(False, "--json", help="The result as JSON on stdout, for other programs."),
    share: list[Path] | None = typer.Option(None, help="A folder here that the script only reads: it is not copied."),
    allow_writes: list[Path] | None = typer.Option(None, help="A folder elsewhere that the script may write to."),
) -> None:
    """Run a failing script again under single changes and say which one cures it. Exit code 1 if none does."""
    from surefoot.experiments.command import run as answer

    raise typer.Exit(
        answer(script, tuple(arguments or ()), module, budget, jobs, out, only, json, share or [], allow_writes or [])
    )


@app.command()
def watch(
    folder: Path = typer.Argument(help="The folder that a run writes, or will write."),
    once: bool = typer.Option(False, "--once", help="Print one view and exit."),
) -> None:
    """Follow a run from another terminal, while it trains. `q` or Ctrl-C ends the watching, not the run."""
    from surefoot.report.terminal.watch import watch as follow

    follow(folder, once)


@app.command(short_help="Write one HTML page about a run, readable offline.")
def report(
    folder: Path = typer.Argument(help="A run folder."),
    out: Path | None = typer.Option(
        None, "--out", "-o", help="Where the page goes (default: report.html in the folder)."
    ),
    show: bool = typer.Option(False, "--open", help="Also open it in the browser."),
) -> None:
    """Write one HTML page about a run, to be read offline, and print its path."""
    from surefoot.report.page.html import write_report

    path = write_report(folder, out)
    typer.echo(path)
    if show:
        typer.launch(str(path.resolve()))


@app.command()
def serve(
    folder: Path = typer.Argument(help="A run folder; one that is still empty is waited for."),
    port: int = typer.Option(8765, min=0, max=65535, help="Where to listen; 0 takes any port that is free."),
    host: str = typer.Option("127.0.0.1", help="Whom to listen to; the default is this machine alone."),
) -> None:
    """Show a run in the browser while it is being written."""
    from surefoot.report.page.serve import serve as answer

    answer(folder, host, port, say=lambda words: typer.echo(words, err=True))


@app.command(short_help="Train clean, bare and guarded while four things go wrong.")
def demo(
    steps: int = typer.Option(400, min=180, help="Optimizer steps of each run."),
    seed: int = typer.Option(0, help="Seed of the data order and the weights."),
    out: Path = typer.Option(Path("runs/demo"), help="Where the script, the run folders and the reports go."),
) -> None:
    """Train a small transformer three ways: clean, with four faults, and with the same faults guarded."""
    from surefoot.demo.command import run_demo
    from surefoot.demo.runs import DemoFailed

    try:
        run_demo(steps, seed, out)
    except DemoFailed as error:
        typer.echo(f"surefoot: {error}", err=True)
        raise typer.Exit(1) from None


@app.command(short_help="Examine a training setup before it runs.")
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
        from surefoot.doctor.terminal import show

        show(examination, _console())
    raise typer.Exit(0 if examination.ok else 1)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    short_help="Run a captured step again, bit for bit; find its cause.",
)
def replay(
    incident: Path = typer.Argument(help="The folder of an incident, such as runs/exp1/incidents/000000123."),
    arguments: list[str] | None = typer.Argument(None, metavar="[ARGS]...", help="The script's own arguments."),
    script: str | None = typer.Option(None, help="The script that trains; its arguments follow (see `surefoot run`)."),
    module: str | None = typer.Option(None, help="A module instead of a script, as `python -m`."),
    target: str | None = typer.Option(
        None, help="module:function, as `surefoot doctor` takes it, instead of a script."
    ),
    export: Path | None = typer.Option(None, help="Write a script into this folder that fails alike with torch alone."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text."),
    seconds: float = typer.Option(600.0, min=1.0, help="How long one of the two passes may take."),
    experiments: bool = typer.Option(
        False, "--experiments", help="Instead, apply the step, go on, and find the single change that cures it."
    ),
    budget: float | None = typer.Option(None, min=1.0, help="Seconds that all experiments may take (default: 600)."),
    jobs: int | None = typer.Option(None, min=0, help="Experiments at the same time (default: half of the cores)."),
    only: str | None = typer.Option(None, help="Only these changes, with commas between, such as lr-3,clip,fp32."),
    out: Path | None = typer.Option(None, help="Where experiments go (default: runs/bisect-incident-STEP-DATE-TIME)."),
    share: list[Path] | None = typer.Option(None, help="A folder here that the script only reads: it is not copied."),
    allow_writes: list[Path] | None = typer.Option(None, help="A folder elsewhere that the script may write to."),
) -> None:
    """Run the step of an incident again, twice, and compare it bit for bit; name the first bad operation.

    The script is the one that you name. Without one, the recorded script is shown, and run if you say yes.

    Exit code 0: reproduced; 3: silent corruption suspected; 4: not deterministic; 5: cannot be compared; 1: reproduced,
    but nothing could be exported. With --experiments 0: a cure was found, or the step did no harm; 1: neither.
    """
    given = {"--budget": budget, "--jobs": jobs, "--only": only, "--out": out}
    if experiments:
        if export is not None:
            raise UsageError("--export writes the reproduction of a plain replay; leave out --experiments, or --export")
        raise typer.Exit(
            _experiments(
                incident,
                script,
                tuple(arguments or ()),
                target,
                module,
                budget,
                jobs,
                only,
                out,
                as_json,
                share or [],
                allow_writes or [],
            )
        )
    if lost := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"{lost[0]} belongs to --experiments, which was not given")
    from surefoot.experiments.command import ended_by_signals
    from surefoot.replay.command import replay as run_again
    from surefoot.replay.consent import asking
    from surefoot.replay.terminal import as_text

    with ended_by_signals():
        found = run_again(
            incident,
            script=script,
            arguments=arguments or (),
            target=target,
            seconds=seconds,
            export=export,
            module=module,
            share=share or (),
            writable=allow_writes or (),
            ask=asking(),
        )
    typer.echo(json.dumps(found.as_json(), indent=2) if as_json else as_text(found))
    raise typer.Exit(found.exit_code)


def _experiments(
    incident: Path,
    script: str | None,
    arguments: tuple[str, ...],
    target: str | None,
    module: str | None,
    budget: float | None,
    jobs: int | None,
    only: str | None,
    out: Path | None,
    as_json: bool,
    share: list[Path],
    writable: list[Path],
) -> int:
    from surefoot.experiments.command import run_on_incident
    from surefoot.record.incidents.reading import read_facts
    from surefoot.replay.consent import asking, order_for

    order = order_for(incident, read_facts(incident), script, arguments, target, module=module, ask=asking())
    seconds = 600.0 if budget is None else budget
    return run_on_incident(incident, order, seconds, jobs or 0, out, only or "", as_json, share, writable)


@app.command(short_help="What a cause looks like, what proves it, what fixes it.")
def explain(
    code: str | None = typer.Argument(None, help="A cause, such as lr.too-high. Without one, all are listed."),
) -> None:
    """Say what a cause looks like, what proves it, what it is mistaken for and how to cure it."""
    from surefoot.diagnose.catalogue import CATALOGUE, nearest_codes

    if code is None:
        _list_causes()
    elif code.strip("`").lower() in CATALOGUE:
        _explain(CATALOGUE[code.strip("`").lower()])
    else:
        near = nearest_codes(code)
        like = f"; did you mean {' or '.join(near)}?" if near else "."
        raise UsageError(f"no cause has the code {code!r}{like} `surefoot explain` lists all {len(CATALOGUE)}.")


def _list_causes() -> None:
    from rich.table import Table

    from surefoot.diagnose.catalogue import CATALOGUE, FAMILIES

    table = Table("cause", "what is wrong", box=None, pad_edge=False)
    for family, covers in FAMILIES.items():
        table.add_row(f"[bold]{family}[/bold]", f"[dim]{covers}[/dim]")
        for cause in CATALOGUE.values():
            if cause.family == family:
                table.add_row(f"  {cause.code}", cause.title)
    _console().print(table)


def _explain(cause: Cause) -> None:
    from rich.markup import escape

    console = _console()
    console.print(f"[bold]{cause.code}[/bold]: {cause.title}", highlight=False)
    for head, text in [("Symptom", cause.symptom), ("Evidence", cause.evidence)]:
        console.print(f"\n[bold]{head}.[/bold] {escape(text)}", highlight=False)
    console.print("\n[bold]Fixes, from fast to invasive[/bold]")
    for number, fix in enumerate(cause.fixes, 1):
        console.print(f"  {number}. {escape(fix)}", highlight=False)
    console.print(f"\n[bold]Looks like.[/bold] {', '.join(cause.look_alikes)}", highlight=False)


def _console() -> Console:
    """A console for results; where there is no terminal, lines are as long as they need to be."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)
