"""Commands that look at recorded runs: `surefoot runs`, `diagnose`, `watch`, `report`, `serve`."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from surefoot.report.run_list import ListedRun


def runs(
    root: Path = typer.Argument(Path("runs"), metavar="DIR", help="The directory that contains the run folders."),
) -> None:
    """List the runs below a directory, the newest first, with their verdicts."""
    from surefoot.report.run_list import list_runs

    found = list_runs(root)
    if not found:
        typer.echo(f"no runs below {root}")
        return
    for line in run_lines(found, shutil.get_terminal_size().columns if sys.stdout.isatty() else None):
        typer.echo(line)


def run_lines(found: list[ListedRun], width: int | None) -> list[str]:
    """The list of runs in columns. If it is wider than the terminal, each cause is on the line below its run."""
    from surefoot.diagnose.terminal import printable
    from surefoot.report.terminal.formatting import age

    rows = [
        (
            printable(str(run.folder)),
            f"{age(time.time() - run.last_write)} ago",
            run.verdict,
            "" if run.steps is None else f"{run.steps:,} steps",
        )
        for run in found
    ]
    folder, written, verdict, steps = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"{row[0]:<{folder}}  {row[1]:>{written}}  {row[2]:<{verdict}}  {row[3]:>{steps}}" for row in rows]
    fits = width is None or len(lines[0]) + 2 + max(len(run.cause) for run in found) <= width
    before = "  " if fits else "\n    "
    return [
        f"{line}{before}{run.cause}" if run.cause else line.rstrip() for line, run in zip(lines, found, strict=True)
    ]


def diagnose(
    folder: Path | None = typer.Argument(None, metavar="DIR", help="A run folder (default: the newest below runs/)."),
    json: bool = typer.Option(False, "--json", help="Print JSON to stdout."),
) -> None:
    """Diagnose a recorded run, with all evidence."""
    from surefoot.core.console import takes_colour
    from surefoot.diagnose.engine import judge_folder
    from surefoot.diagnose.terminal import as_full_text
    from surefoot.record.run_folder import as_json

    folder = _chosen(folder)
    diagnosis, description = judge_folder(folder)
    if json:
        typer.echo(as_json(diagnosis.as_json(), indent=2))
    else:
        typer.echo(as_full_text(diagnosis, str(folder), takes_colour(sys.stdout)))
    if not json and description.exit_code is None:
        why = "" if diagnosis.verdict == "unknown" else "; the run was killed, or is still running"
        by_log = diagnosis.saved_steps is not None
        saved = diagnosis.saved_steps if by_log else diagnosis.steps
        state = [f"by the state that was saved at step {saved:,}"] if saved or not by_log else []
        state += [f"by the log up to step {diagnosis.steps:,}"] if by_log else []
        typer.echo(f"  judged {' and '.join(state)}{why}")


def watch(
    folder: Path | None = typer.Argument(
        None, metavar="DIR", help="A run folder, which may not exist yet (default: the newest below runs/)."
    ),
    once: bool = typer.Option(False, "--once", help="Print the view once and exit."),
) -> None:
    """Show a live view of a run in another terminal. `q` or Ctrl-C closes the view; the run continues."""
    from surefoot.report.terminal.watch import watch as follow

    follow(_chosen(folder), once)


def report(
    folders: list[Path] | None = typer.Argument(
        None, metavar="DIR", help="A run folder (default: the newest below runs/), or several to compare."
    ),
    out: Path | None = typer.Option(
        None, "--out", "-o", help="The file to write (default: report.html, or comparison.html, in the first folder)."
    ),
    show: bool = typer.Option(False, "--open", help="Also open the page in the browser."),
) -> None:
    """Write one HTML page about a run, or a comparison of several runs, and print its path. The page works offline."""
    from surefoot.report.page.compare import write_comparison
    from surefoot.report.page.html import write_report

    if folders and len(folders) > 1:
        path = write_comparison(folders, out)
    else:
        path = write_report(_chosen(folders[0] if folders else None), out)
    typer.echo(path)
    if show:
        typer.launch(str(path.resolve()))


def serve(
    folder: Path | None = typer.Argument(
        None, metavar="DIR", help="A run folder, which may still be empty (default: the newest below runs/)."
    ),
    port: int = typer.Option(8765, min=0, max=65535, help="Port to listen on; 0 selects a free port."),
    host: str = typer.Option(
        "127.0.0.1", help="Address to bind; the default accepts connections from this machine only."
    ),
) -> None:
    """Serve the page of a run, updated live."""
    from surefoot.report.page.serve import serve as serve_page

    serve_page(_chosen(folder), host, port, show=lambda words: typer.echo(words, err=True))


def _chosen(folder: Path | None) -> Path:
    """The run that was asked for, or the newest one, which is named on stderr."""
    if folder is not None:
        return folder
    from surefoot.report.run_list import newest_run

    newest = newest_run()
    typer.echo(f"surefoot: the newest run: {newest}", err=True)
    return newest
