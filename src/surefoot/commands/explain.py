"""`surefoot explain [CODE]`: the catalogue of causes in the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from surefoot.diagnose.catalogue import Cause


VERDICTS = {
    "healthy": (
        "The training loss falls, and no known fault was found. The accuracy on test data is not judged.",
        "Train longer. If the schedule has a fixed length (milestones, `T_max`), stretch it as well.",
        "Compare the losses: if the training loss is low and the validation loss is high, the model overfits.",
        "If both are high, run `surefoot doctor file.py:build` on a function that returns model, loader, loss function "
        "and optimizer. It checks whether the model can fit one batch.",
        "If it can, the fault may be in the data: print a few inputs with their labels.",
    ),
    "unstable": (
        "There are warnings, or `--guard` skipped steps.",
        "Apply the first fix of the first finding, and run the script again.",
        "Run `surefoot diagnose`, which prints the evidence and all fixes.",
    ),
    "broken": (
        "A finding is an error, or `--guard` skipped most steps.",
        "Apply the first fix of the first finding, and run the script again: the others are often its consequences.",
        "Run `surefoot diagnose`, which prints the evidence and all fixes.",
        "Run `surefoot bisect SCRIPT`, which tries single changes and reports which one cures the script.",
    ),
    "unknown": (
        "There is no finding, but the run could not be judged. The summary says why.",
        "Follow the summary. In most cases: train for more steps, or let the script run to its end.",
        "Run `surefoot doctor file.py:build` on a function that returns model, loader, loss function and optimizer.",
    ),
}
"""The meaning of each verdict, and what to do next."""


def _codes(incomplete: str) -> list[str]:
    """The codes and verdicts that a shell can complete to."""
    from surefoot.diagnose.catalogue import CATALOGUE

    return [code for code in (*CATALOGUE, *VERDICTS) if code.startswith(incomplete)]


def explain(
    code: str | None = typer.Argument(
        None,
        metavar="CODE",
        help="The code of a cause, such as lr.too-high, or a verdict. Without it, all causes are listed.",
        autocompletion=_codes,
    ),
) -> None:
    """Explain a cause (its symptom, its evidence, its fixes, and similar causes), or what to do after a verdict."""
    from surefoot.diagnose.catalogue import CATALOGUE, nearest_codes

    given = (code or "").strip("`").lower()
    if code is None:
        _list_causes()
    elif given in CATALOGUE:
        _explain(CATALOGUE[given])
    elif given in VERDICTS:
        _explain_verdict(given)
    else:
        near = nearest_codes(code)
        like = f"; did you mean {' or '.join(near)}?" if near else "."
        raise UsageError(f"no cause has the code {code!r}{like} `surefoot explain` lists all {len(CATALOGUE)}.")


def _list_causes() -> None:
    from rich.table import Table

    from surefoot.core.console import result_console
    from surefoot.diagnose.catalogue import CATALOGUE, FAMILIES

    table = Table("cause", "what is wrong", box=None, pad_edge=False)
    for family, covers in FAMILIES.items():
        table.add_row(f"[bold]{family}[/bold]", f"[dim]{covers}[/dim]")
        for cause in CATALOGUE.values():
            if cause.family == family:
                table.add_row(f"  {cause.code}", cause.title)
    result_console().print(table)


def _explain(cause: Cause) -> None:
    from rich.markup import escape

    from surefoot.core.console import result_console

    console = result_console()
    console.print(f"[bold]{cause.code}[/bold]: {cause.title}", highlight=False)
    for head, text in [("Symptom", cause.symptom), ("Evidence", cause.evidence)]:
        console.print(f"\n[bold]{head}.[/bold] {escape(text)}", highlight=False)
    _print_numbered("Fixes, from fast to invasive", cause.fixes, console)
    console.print(f"\n[bold]Similar causes.[/bold] {', '.join(cause.look_alikes)}", highlight=False)


def _explain_verdict(verdict: str) -> None:
    from rich.markup import escape

    from surefoot.core.console import result_console

    console, (meaning, *steps) = result_console(), VERDICTS[verdict]
    console.print(f"[bold]{verdict}[/bold]: {escape(meaning)}", highlight=False)
    _print_numbered("If the result is still poor" if verdict == "healthy" else "What to do next", steps, console)


def _print_numbered(title: str, texts: Sequence[str], console: Console) -> None:
    from rich.markup import escape

    console.print(f"\n[bold]{title}[/bold]")
    for number, text in enumerate(texts, 1):
        lines = textwrap.wrap(text, console.width - 5, break_long_words=False, break_on_hyphens=False)
        console.print(f"  {number}. " + escape("\n     ".join(lines)), highlight=False)
