"""Commands that look at a recorded run: `surefoot diagnose`, `watch`, `report`, `serve`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)

import typer


def diagnose(
    folder: Path = typer.Argument(help="A run folder, as `surefoot run --out DIR` leaves one."),
    json: bool = typer.Option(False, "--json", help="As JSON on stdout, for other programs."),
) -> None:
    """Say what was wrong with a recorded run, with all the evidence."""
    from surefoot.diagnose.engine import diagnose as judge
    from surefoot.diagnose.engine import load
    from surefoot.diagnose.terminal import as_full_text
    from surefoot.record.run_folder import as_json

    facts, description = load(folder)
    diagnosis = judge(facts, description)
    typer.echo(as_json(diagnosis.as_json(), indent=2) if json else as_full_text(diagnosis, str(folder)))
    if not json and description.exit_code is None:
        typer.echo(
            f"  the run did not end (killed, or still going): judged by what was saved at step {diagnosis.steps:,}"
        )


def watch(
    folder: Path = typer.Argument(help="The folder that a run writes, or will write."),
    once: bool = typer.Option(False, "--once", help="Print one view and exit."),
) -> None:
    """Follow a run from another terminal, while it trains. `q` or Ctrl-C ends the watching, not the run."""
    from surefoot.report.terminal.watch import watch as follow

    follow(folder, once)


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


def serve(
    folder: Path = typer.Argument(help="A run folder; one that is still empty is waited for."),
    port: int = typer.Option(8765, min=0, max=65535, help="Port to listen on; 0 takes any free port."),
    host: str = typer.Option("127.0.0.1", help="Address to bind; the default is this machine only."),
) -> None:
    """Show a run in the browser while it is being written."""
    from surefoot.report.page.serve import serve as serve_page

    serve_page(folder, host, port, say=lambda words: typer.echo(words, err=True))
