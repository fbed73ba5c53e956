"""Commands that run a script again: `surefoot bisect` and `surefoot replay`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 (typer reads the annotations)

import typer

from surefoot.errors import UsageError


def bisect(
    script: str = typer.Argument(
        metavar="SCRIPT", help="The script, or with -m a module. Arguments after it are passed to it."
    ),
    arguments: list[str] | None = typer.Argument(None, metavar="ARGS", help="The script's own arguments."),
    budget: float = typer.Option(600.0, min=1.0, help="Time limit for all runs together, in seconds of wall time."),
    jobs: int = typer.Option(0, min=0, help="Number of parallel runs (default: half of the cores; 1 with a GPU)."),
    out: Path | None = typer.Option(None, help="The folder to create (default: runs/bisect-SCRIPT-DATE-TIME)."),
    only: str = typer.Option("", help="Try only these changes, separated by commas, such as lr-3,clip,fp32."),
    module: bool = typer.Option(False, "-m", help="Run a module, as `python -m` does."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON to stdout."),
    share: list[Path] | None = typer.Option(None, help="A folder here that the script only reads; it is not copied."),
    allow_writes: list[Path] | None = typer.Option(None, help="A folder elsewhere that the script may write to."),
) -> None:
    """Run a failing script again with single changes, and report which one cures it. Exit code 1 if none does."""
    from surefoot.experiments.command import Options
    from surefoot.experiments.command import run as find_cure

    options = Options(budget, jobs, out, only, as_json, tuple(share or ()), tuple(allow_writes or ()))
    raise typer.Exit(find_cure(script, tuple(arguments or ()), module, options))


@dataclass(frozen=True)
class _Replay:
    """The incident, and the code that its step is run by."""

    incident: Path
    script: str | None
    arguments: tuple[str, ...]
    target: str | None
    module: str | None
    share: tuple[Path, ...]
    writable: tuple[Path, ...]
    as_json: bool


def replay(
    incident: Path = typer.Argument(
        metavar="INCIDENT", help="The folder of an incident, such as runs/exp1/incidents/000000123."
    ),
    arguments: list[str] | None = typer.Argument(None, metavar="ARGS", help="The script's own arguments."),
    script: str | None = typer.Option(None, help="The training script; its arguments follow, as for `surefoot run`."),
    module: str | None = typer.Option(None, help="A module instead of a script, as with `python -m`."),
    target: str | None = typer.Option(None, help="module:function, as for `surefoot doctor`, instead of a script."),
    export: Path | None = typer.Option(
        None, help="Write a script into this folder that reproduces the failure with torch only."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text."),
    seconds: float = typer.Option(600.0, min=1.0, help="Time limit for each of the two passes."),
    experiments: bool = typer.Option(
        False, "--experiments", help="Apply the step, continue the run, and find the single change that cures it."
    ),
    budget: float | None = typer.Option(None, min=1.0, help="Seconds for all experiments together (default: 600)."),
    jobs: int | None = typer.Option(None, min=0, help="Number of parallel experiments (default: half of the cores)."),
    only: str | None = typer.Option(None, help="Try only these changes, separated by commas, such as lr-3,clip,fp32."),
    out: Path | None = typer.Option(None, help="Folder to create (default: runs/bisect-incident-STEP-DATE-TIME)."),
    share: list[Path] | None = typer.Option(None, help="A folder here that the script only reads; it is not copied."),
    allow_writes: list[Path] | None = typer.Option(None, help="A folder elsewhere that the script may write to."),
) -> None:
    """Run the step of an incident again twice, compare it bit for bit, and name the first bad operation.

    Name the script with --script. Without it, the recorded command is shown, and run only if you confirm.

    Exit code 0: reproduced; 3: silent corruption suspected; 4: not deterministic; 5: cannot be compared; 1: reproduced,
    but nothing could be exported. With --experiments 0: a cure was found, or the step did no harm; 1: neither.
    """
    what = _Replay(
        incident,
        script,
        tuple(arguments or ()),
        target,
        module,
        tuple(share or ()),
        tuple(allow_writes or ()),
        as_json,
    )
    if experiments:
        if export is not None:
            raise UsageError("--export and --experiments cannot be combined; remove one of them")
        raise typer.Exit(_try_changes(what, budget, jobs, only, out))
    _refuse({"--budget": budget, "--jobs": jobs, "--only": only, "--out": out})
    raise typer.Exit(_run_again(what, seconds, export))


def _refuse(given: dict[str, object]) -> None:
    """Raise for an option that only experiments have."""
    if unused := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"{unused[0]} can be used only with --experiments; add --experiments, or remove {unused[0]}")


def _run_again(what: _Replay, seconds: float, export: Path | None) -> int:
    from surefoot.core.console import wrapped_for
    from surefoot.experiments.command import ended_by_signals
    from surefoot.replay.command import replay as run_again
    from surefoot.replay.consent import asking
    from surefoot.replay.verdict import as_text

    with ended_by_signals():
        found = run_again(
            what.incident,
            script=what.script,
            arguments=what.arguments,
            target=what.target,
            seconds=seconds,
            export=export,
            module=what.module,
            share=what.share,
            writable=what.writable,
            ask=asking(),
        )
    typer.echo(json.dumps(found.as_json(), indent=2) if what.as_json else wrapped_for(sys.stdout, as_text(found)))
    return found.exit_code


def _try_changes(what: _Replay, budget: float | None, jobs: int | None, only: str | None, out: Path | None) -> int:
    from surefoot.experiments.command import Options, run_on_incident
    from surefoot.record.incidents.reading import read_facts
    from surefoot.replay.consent import asking, order_for

    facts = read_facts(what.incident)
    order = order_for(what.incident, facts, what.script, what.arguments, what.target, module=what.module, ask=asking())
    options = Options(
        600.0 if budget is None else budget, jobs or 0, out, only or "", what.as_json, what.share, what.writable
    )
    return run_on_incident(what.incident, order, options)
