"""`surefoot replay`: choose the script or target, run two passes, and print the verdict."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from surefoot.experiments import scratch_folder
from surefoot.experiments.sandbox import warn_if_unconfined
from surefoot.record.incidents.reading import read_facts
from surefoot.replay.consent import import_path, order_for, received
from surefoot.replay.export.script import usable
from surefoot.replay.processes import run_pass
from surefoot.replay.verdict import Replayed, judge


def replay(
    incident: str | Path,
    *,
    script: str | None = None,
    arguments: Sequence[str] = (),
    target: str | None = None,
    seconds: float = 600.0,
    export: str | Path | None = None,
    module: str | None = None,
    share: Sequence[str | Path] = (),
    writable: Sequence[str | Path] = (),
    ask: Callable[[str], bool] | None = None,
) -> Replayed:
    """Run the step of an incident twice and compare. Raises `UsageError` if it cannot be run.

    Args:
        incident: The folder of the incident.
        script: The script that trains. Without it, a module or a target, `ask` is asked about the recorded one.
        arguments: The script's own arguments; the recorded ones if left out with the script.
        target: `module:function` or `file.py:function`, as `surefoot doctor` takes it.
        seconds: How long one pass may take.
        export: A folder for a script that fails as the step does, with torch alone.
        module: The name of a module, in place of a script.
        share: What of the working directory the script only reads, and need not be copied.
        writable: Folders outside of the working directory that the script may write to.
        ask: Given what the incident names, whether to run it. Without it nothing is run that was not named.
    """
    folder = Path(incident)
    facts = read_facts(folder)
    order = order_for(folder, facts, script, tuple(arguments), target, module, ask)
    order = replace(
        order,
        seconds=seconds,
        share=scratch_folder.shared(share, Path.cwd()),
        writable=scratch_folder.writable(writable),
        path=tuple(import_path(received(folder))),
    )
    warn_if_unconfined()
    with tempfile.TemporaryDirectory(prefix="surefoot-replay-", ignore_cleanup_errors=True) as scratch:
        kept = Path(scratch) / "incident"
        shutil.copytree(folder, kept, symlinks=True, copy_function=_link)
        order = replace(order, incident=kept, export=None if export is None else usable(Path(export)))
        try:
            first = run_pass(order, Path(scratch), 1, locate=False)
            second = run_pass(order, Path(scratch), 2, locate=True)
        finally:
            if not folder.exists():  # some scripts begin by deleting their last run, incidents included
                shutil.copytree(kept, folder)
    return judge(facts, first, second)


def _link(source: str, place: str) -> None:
    """Hard-link a file, or copy it if that is not possible. Pipes and devices are not part of an incident."""
    if not stat.S_ISREG(os.lstat(source).st_mode):
        return
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:
        shutil.copyfile(source, place, follow_symlinks=False)
