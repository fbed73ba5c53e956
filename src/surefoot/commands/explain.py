"""`surefoot explain [CODE]`: the catalogue of causes in the terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import typer

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from surefoot.diagnose.catalogue import Cause


def _codes(incomplete: str) -> list[str]:
    """The codes that a shell can complete to."""
    from surefoot.diagnose.catalogue import CATALOGUE

    return [code for code in CATALOGUE if code.startswith(incomplete)]


def explain(
    code: str | None = typer.Argument(
        None,
        metavar="CODE",
        help="The code of a cause, such as lr.too-high. Without it, all causes are listed.",
        autocompletion=_codes,
    ),
) -> None:
    """Explain a cause: its symptom, its evidence, its fixes, and causes that look similar."""
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
    console.print("\n[bold]Fixes, from fast to invasive[/bold]")
    for number, fix in enumerate(cause.fixes, 1):
        lines = textwrap.wrap(fix, console.width - 5, break_long_words=False, break_on_hyphens=False)
        console.print(f"  {number}. " + escape("\n     ".join(lines)), highlight=False)
    console.print(f"\n[bold]Similar causes.[/bold] {', '.join(cause.look_alikes)}", highlight=False)
