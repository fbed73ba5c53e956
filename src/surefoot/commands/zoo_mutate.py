"""What `surefoot zoo mutate` does once its options are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.zoo.mutation import Mutant
    from surefoot.zoo.mutation.runs import Limits, MutantRun


def check(half: str, recorded: Path | None, keep: Path | None, json: Path | None) -> None:
    """Refuse options that make no sense."""
    if half not in ("tuning", "testing"):
        raise UsageError(f"--half must be tuning or testing; got {half!r}.")
    if recorded is not None and (keep is not None or json is not None):
        raise UsageError("--from cannot be combined with --keep or --json: it runs no script.")
    if recorded is not None and not recorded.is_dir():
        raise UsageError(f"there is no folder {recorded}. Pass a folder that `surefoot zoo mutate --keep` wrote.")


def chosen_mutants(half: str, operators: list[str], parents: list[str], limit: int) -> list[Mutant]:
    """The mutants of one half, and their parents before them."""
    from surefoot.zoo.mutation import Mutant, mutants, parent_scripts
    from surefoot.zoo.mutation.operators import OPERATORS

    mine = [operator for operator in OPERATORS if operator.half == half]
    scripts = parent_scripts(half)
    _check_names("operator", operators, [operator.name for operator in mine], half)
    _check_names("healthy script", parents, [script.path.stem for script in scripts], half)
    found, without = mutants(
        half,
        [operator for operator in mine if not operators or operator.name in operators],
        [script for script in scripts if not parents or script.path.stem in parents],
    )
    if not found:
        raise UsageError(f"no mutant: {without[0]}.")
    typer.echo(
        f"surefoot: {len(found)} mutants; {len(without)} pairs left out, where the operator does not apply",
        err=True,
    )
    if operators and parents:
        for line in without:
            typer.echo(f"surefoot: {line}", err=True)
    found = found[: limit or None]
    texts = {mutant.parent: mutant.parent.path.read_text(encoding="utf-8") for mutant in found}
    return [*(Mutant(parent, None, None, text) for parent, text in texts.items()), *found]


def _check_names(what: str, given: list[str], known: list[str], half: str) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"no {what} of the {half} half is called {name!r}. There are: {', '.join(sorted(known))}.")


def write_scripts(chosen: list[Mutant], folder: Path) -> None:
    """Write mutants as `OPERATOR/PARENT.py`."""
    for mutant in chosen:
        path = folder / mutant.label / f"{mutant.parent.path.stem}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(mutant.text, encoding="utf-8")
    typer.echo(f"{len(chosen)} scripts in {folder}")


def seed_numbers(count: int) -> list[int]:
    """The seeds that the scripts are given."""
    from surefoot.zoo.mutation.runs import FIRST_SEED

    return list(range(FIRST_SEED, FIRST_SEED + count))


def from_folders(chosen: list[Mutant], seeds: list[int], folder: Path) -> list[MutantRun]:
    """The runs that were kept, diagnosed again."""
    from surefoot.zoo.mutation.runs import kept

    found = kept(chosen, seeds, folder)
    if not found:
        raise UsageError(
            f"no run of the chosen mutants in {folder}: operators and scripts must be those that were run."
        )
    return found


def known_runs(json: Path | None) -> list[MutantRun]:
    """The results that the file holds."""
    from surefoot.zoo.mutation.runs import read_lines

    return read_lines(json) if json is not None else []


def run(
    chosen: list[Mutant],
    seeds: list[int],
    jobs: int,
    limits: Limits,
    keep: Path | None,
    json: Path | None,
    held: list[MutantRun],
) -> list[MutantRun]:
    """Run what the file does not hold yet; all results of the chosen mutants."""
    from surefoot.core.console import progress_bar
    from surefoot.zoo.mutation.runs import needed, planned, run_all

    wanted = {planned(mutant, seed).key for mutant in chosen for seed in needed(mutant, seeds)}
    known = {each.key: each for each in held if each.key in wanted}
    with progress_bar() as progress:
        task = progress.add_task("mutants", total=len(wanted), completed=len(known))

        def done(result: MutantRun) -> None:
            if json is not None:
                with json.open("a", encoding="utf-8") as file:
                    file.write(f"{result.as_line()}\n")
            progress.update(task, advance=1, description=f"{result.operator or 'healthy'} on {result.parent}"[-48:])

        new = run_all(chosen, seeds, jobs, limits, keep, done, known.values())
    return [*known.values(), *new]


def show(half: str, runs: list[MutantRun]) -> None:
    """Print the figures."""
    from surefoot.core.console import result_console
    from surefoot.zoo.mutation import printed
    from surefoot.zoo.mutation.figures import judge
    from surefoot.zoo.mutation.operators import OPERATORS

    printed.show(half, judge(runs, OPERATORS), result_console(plain_width=200))
