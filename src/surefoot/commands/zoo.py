"""`surefoot zoo list|run|score|mutate`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING

import typer

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from surefoot.zoo.score import Result

SEEDS = "100,101,102"

app = typer.Typer(help="Scripts with known causes: list, run, score, mutate.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def _zoo(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        raise UsageError("`surefoot zoo` needs one of list, run, score, mutate. See `surefoot zoo --help`.")


@app.command("list")
def list_scripts(
    half: str = typer.Option("both", help="tuning, testing, both, or ranks (scripts for several processes)."),
    only: str = typer.Option("", help="Only scripts whose name contains this text."),
) -> None:
    """List the scripts with their true causes."""
    from surefoot.zoo import specimens

    _check_half(half)
    for specimen in specimens(half, only):
        typer.echo(specimen.name)


@app.command()
def run(
    name: str = typer.Argument(metavar="NAME", help="The name of a script, or a part that is unique."),
    seed: int = typer.Argument(100, metavar="SEED", help="Passed to the script."),
    out: Path | None = typer.Option(None, help="The run folder to create (default: runs/SCRIPT-DATE-TIME)."),
) -> None:
    """Run one script with `surefoot run`, and print its true cause."""
    from surefoot.commands.run import main
    from surefoot.zoo import RANKS, find

    specimen = find(name)
    if specimen.half == RANKS:
        raise UsageError(
            f"{specimen.name} needs several processes. Run it with: torchrun --nproc-per-node 2 -m surefoot run "
            f"{specimen.path} {seed}"
        )
    typer.echo(f"surefoot: the true cause is {specimen.truth}", err=True)
    main([*(["--out", str(out)] if out is not None else []), str(specimen.path), str(seed)])


@app.command()
def score(
    half: str = typer.Option("both", help="tuning, testing, both, or ranks (scripts for several processes)."),
    seeds: str = typer.Option(SEEDS, help="Seeds, separated by commas (with --from: all recorded seeds)."),
    jobs: int = typer.Option(os.cpu_count() or 1, min=1, help="Number of parallel scripts."),
    only: str = typer.Option("", help="Only scripts whose name contains this text."),
    json: Path | None = typer.Option(None, help="Also write the results to this JSON file."),
    keep: Path | None = typer.Option(None, help="Keep the run folders in this folder."),
    recorded: Path | None = typer.Option(None, "--from", help="Score the run folders in this folder; run no script."),
    timeout: float = typer.Option(180.0, min=1.0, help="Time limit for each script, in seconds."),
    device: str = typer.Option("cpu", help="The device for the scripts: cpu, or an accelerator as torch names it."),
) -> None:
    """Run every script, diagnose it, and compare with the true cause."""
    from surefoot.core.console import result_console
    from surefoot.zoo import score as board

    _check_half(half)
    numbers = _seeds(seeds)
    if recorded is not None:
        if keep is not None:
            raise UsageError("--keep and --from cannot be combined: --from runs no script.")
        if device != "cpu":
            raise UsageError("--device and --from cannot be combined: --from runs no script.")
        given = numbers if seeds != SEEDS else None
        results = list(board.recorded(recorded, half, only, given))
    else:
        results = _run(half, only, numbers, jobs, keep, timeout, device)
    if not results:
        where = f"in {recorded}" if recorded is not None else "in the zoo"
        raise UsageError(
            f"no script {where} matches --half {half} --only {only!r}; `surefoot zoo list` lists all scripts."
        )
    board.show(results, result_console(plain_width=200))
    if json is not None:
        json.write_text(board.as_json(results), encoding="utf-8")


@app.command()
def mutate(
    half: str = typer.Option("tuning", help="tuning, or testing: operators and scripts that no rule was tuned on."),
    operators: str = typer.Option("", help="Only these operators, separated by commas."),
    parents: str = typer.Option("", help="Only these healthy scripts, separated by commas."),
    seeds: int = typer.Option(3, min=1, help="Seeds per script. With fewer than 3, no mutant counts as harmful."),
    jobs: int = typer.Option(os.cpu_count() or 1, min=1, help="Number of parallel scripts."),
    limit: int = typer.Option(0, min=0, help="Maximum number of mutants, a fixed sample (0: all)."),
    write: Path | None = typer.Option(None, help="Write the mutants to this folder as scripts; run no script."),
    json: Path | None = typer.Option(None, help="Append each result to this file; results in it are not run again."),
    keep: Path | None = typer.Option(None, help="Keep the run folders in this folder."),
    recorded: Path | None = typer.Option(None, "--from", help="Diagnose the run folders in this folder; run nothing."),
    timeout: float = typer.Option(180.0, min=1.0, help="Time limit for each script, in seconds."),
    within: float = typer.Option(
        math.inf, min=1.0, help="Time limit for all, in seconds (with --json: continue later)."
    ),
) -> None:
    """Plant faults in healthy scripts, and score the diagnosis."""
    from surefoot.commands import zoo_mutate
    from surefoot.zoo.mutation.runs import Limits

    zoo_mutate.check(half, recorded, keep, json)
    known = zoo_mutate.known_runs(json)
    chosen = zoo_mutate.chosen_mutants(half, _words(operators), _words(parents), limit)
    if write is not None:
        zoo_mutate.write_scripts(chosen, write)
        return
    numbers = zoo_mutate.seed_numbers(seeds)
    if recorded is not None:
        runs = zoo_mutate.from_folders(chosen, numbers, recorded)
    else:
        runs = zoo_mutate.run(chosen, numbers, jobs, Limits(timeout, within), keep, json, known)
    zoo_mutate.show(half, runs)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _run(
    half: str, only: str, seeds: list[int], jobs: int, keep: Path | None, timeout: float, device: str
) -> list[Result]:
    from surefoot.core.console import progress_bar
    from surefoot.zoo import score as board
    from surefoot.zoo import specimens

    run_all = board.run_all if device == "cpu" else _on_device(device)
    chosen = specimens(half, only)
    with progress_bar() as progress:
        task = progress.add_task("zoo", total=len(chosen) * len(seeds))

        def done(result: board.Result) -> None:
            progress.update(task, advance=1, description=result.name[-48:])

        return run_all(chosen, seeds, jobs, keep, timeout, done)


def _on_device(name: str) -> Callable[..., list[Result]]:
    """`run_all` on a device that is there."""
    from functools import partial

    from surefoot.core.device import usable
    from surefoot.zoo.device_runs import run_all

    return partial(run_all, str(usable(name)))


def _check_half(half: str) -> None:
    if half not in ("tuning", "testing", "both", "ranks"):
        raise UsageError(f"--half must be tuning, testing, both or ranks; got {half!r}.")


def _seeds(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--seeds must be integers separated by commas, such as 100,101; got {text!r}.") from None
    return list(dict.fromkeys(found))
