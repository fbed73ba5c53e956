"""`surefoot checkpoints list|verify|export|import`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING

import typer

from surefoot.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from surefoot.keep.checkpoint.listing import CheckpointListing

_LEFTOVER = "the rest of a deleted checkpoint: not every rank has deleted its part"
app = typer.Typer(help="Checkpoints of a run: list, verify, export, import.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def _checkpoints(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        raise UsageError(
            "`surefoot checkpoints` needs one of list, verify, export, import. See `surefoot checkpoints --help`."
        )


@app.command("list")
def list_steps(
    folder: Path = typer.Argument(metavar="DIR", help="The run folder, or the folder of its checkpoints."),
) -> None:
    """List the checkpoints of a run, the newest first. Reads the manifests only."""
    from surefoot.keep.checkpoint.listing import (
        by_metric,
        checkpoints_in,
        complete_steps,
        incompletely_deleted,
        list_checkpoints,
    )

    steps = list_checkpoints(checkpoints_in(folder))
    leftovers = incompletely_deleted(steps)
    newest_first = complete_steps(steps)
    best = by_metric(newest_first)[:1]
    for listing in [*newest_first, *(each for each in steps if not each.whole)]:
        typer.echo(f"step {listing.step:>8,}  {_LEFTOVER}" if listing in leftovers else _line(listing, listing in best))


@app.command()
def verify(
    folder: Path = typer.Argument(metavar="DIR", help="The run folder, or the folder of its checkpoints."),
) -> None:
    """Read every byte of every checkpoint and compare the checksums. Exit code 1 if one is damaged or incomplete."""
    from surefoot.keep.checkpoint.exchange import verify_step
    from surefoot.keep.checkpoint.listing import checkpoints_in, incompletely_deleted, list_checkpoints

    damaged, steps = 0, list_checkpoints(checkpoints_in(folder))
    leftovers = incompletely_deleted(steps)
    for listing in steps:
        name = f"step {listing.step:,}{' (evidence)' if listing.aside else ''}"
        if listing in leftovers:
            typer.echo(f"{name}: {_LEFTOVER}")
            continue
        found = verify_step(listing)
        damaged += found.fault is not None
        parts = f"{len(listing.paths)} part{'s' * (len(listing.paths) != 1)}, {found.bytes:,} bytes"
        spread = f", with {found.tensors} complete sharded tensors" if found.tensors else ""
        typer.echo(f"{name}: damaged: {found.fault}" if found.fault else f"{name}: complete, {parts}{spread}")
    if damaged:
        raise typer.Exit(1)


@app.command()
def export(
    folder: Path = typer.Argument(metavar="DIR", help="The run folder, or the folder of its checkpoints."),
    out: Path = typer.Argument(metavar="FILE", help="The safetensors file to write; must not exist."),
    step: str = typer.Option("latest", help="latest, good, best, or a step number."),
    weights: bool = typer.Option(False, "--weights", help="Only the weights of the models, by name."),
) -> None:
    """Write a checkpoint as one safetensors file. Checkpoints of several processes are joined."""
    from surefoot.keep.checkpoint.exchange import export_state, export_weights, load_whole
    from surefoot.keep.checkpoint.listing import checkpoints_in

    try:
        loaded = load_whole(checkpoints_in(folder), step)
        facts = (export_weights if weights else export_state)(loaded, out)
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    what = "the weights" if weights else "the state"
    typer.echo(f"{out}: {what} of step {loaded.step:,}, {facts['bytes']:,} bytes, sha256 {facts['sha256']}")


@app.command("import")
def import_file(
    file: Path = typer.Argument(metavar="FILE", help="A file that `surefoot checkpoints export` wrote."),
    folder: Path = typer.Argument(metavar="DIR", help="The run folder to write the checkpoint to."),
) -> None:
    """Create a checkpoint from an exported file. Any number of processes can resume from it."""
    from surefoot.keep.checkpoint.exchange import import_state

    try:
        typer.echo(f"{import_state(file, folder)}: written; a run can resume from it")
    except CheckpointError as error:
        raise UsageError(str(error)) from error


def _line(listing: CheckpointListing, best: bool) -> str:
    """One checkpoint in one line, of at most 80 columns."""
    from surefoot.report.terminal.formatting import size as size_in_words

    name = f"step {listing.step:>8,}"
    if listing.fault is not None:
        return f"{name}  incomplete: {listing.fault}"
    kind = "good" if listing.good else "evidence" if listing.aside or not listing.finite else "near an alarm"
    count, size = len(listing.paths), sum(manifest.bytes for manifest in listing.manifests.values())
    parts = f"  {count} parts" if count != 1 else ""
    metric = "" if listing.metric is None else f"  metric {listing.metric:.5g}{' (best)' * best}"
    saved_at = listing.first.saved_at.replace("T", " ")[:16]
    return f"{name}  {kind:<8}{size_in_words(size):>8}  {saved_at} UTC{metric}{parts}"
