"""`surefoot replay`: which script or target, two passes, and the verdict."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.diagnose.export.folder import usable
from surefoot.diagnose.replay.passes import Order, run_pass
from surefoot.diagnose.replay.verdict import Replayed, judge
from surefoot.errors import UsageError
from surefoot.record.incidents.reading import read_facts

if TYPE_CHECKING:
    from collections.abc import Sequence


def replay(
    incident: str | Path,
    *,
    script: str | None = None,
    arguments: Sequence[str] = (),
    target: str | None = None,
    seconds: float = 600.0,
    export: str | Path | None = None,
) -> Replayed:
    """Run the step of an incident twice and compare. Raises `UsageError` if it cannot be run.

    Args:
        incident: The folder of the incident.
        script: The script that trains; the recorded one if neither it nor a target is given.
        arguments: The script's own arguments; the recorded ones if left out with the script.
        target: `module:function` or `file.py:function`, as `surefoot doctor` takes it.
        seconds: How long one pass may take.
        export: A folder for a script that fails as the step does, with torch alone.
    """
    folder = Path(incident)
    facts = read_facts(folder)
    order = order_for(folder, facts, script, tuple(arguments), target, seconds)
    with tempfile.TemporaryDirectory(prefix="surefoot-replay-", ignore_cleanup_errors=True) as scratch:
        kept = Path(scratch) / "incident"
        shutil.copytree(folder, kept, copy_function=_link)
        order = replace(order, incident=kept, export=None if export is None else usable(Path(export)))
        try:
            first = run_pass(order, Path(scratch), 1, locate=False)
            second = run_pass(order, Path(scratch), 2, locate=True)
        finally:
            if not folder.exists():  # many a script begins by clearing away its last run, incidents included
                shutil.copytree(kept, folder)
    return judge(facts, first, second)


def order_for(
    folder: Path,
    facts: dict[str, Any],
    script: str | None,
    arguments: tuple[str, ...],
    target: str | None,
    seconds: float = 600.0,
) -> Order:
    """What plays the step: the target, the script, or the recorded one."""
    if script is not None and target is not None:
        raise UsageError("give --script or --target, not both")
    if target is not None:
        return Order(folder, target=target, seconds=seconds)
    return _script_order(folder, facts, script, arguments, seconds)


def _link(source: str, place: str) -> None:
    """A second name for a file, or a copy where that cannot be."""
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:
        shutil.copyfile(source, place, follow_symlinks=False)


def _script_order(
    folder: Path, facts: dict[str, Any], script: str | None, arguments: tuple[str, ...], seconds: float
) -> Order:
    recorded = facts["script"]
    if script is not None:
        if not Path(script).exists():
            raise UsageError(f"there is no script {script!r} here")
        return Order(folder, script=script, arguments=arguments, seconds=seconds)
    arguments = arguments or tuple(str(word) for word in recorded.get("arguments", []))
    if recorded.get("module"):
        return Order(folder, script=str(recorded["module"]), module=True, arguments=arguments, seconds=seconds)
    path = recorded.get("path")
    if not path:
        raise UsageError("the incident names no script: give --script train.py or --target module:function")
    if not Path(path).is_file():
        raise UsageError(
            f"the recorded script {path!r} is not here: go to where it was started, or give --script or --target"
        )
    return Order(folder, script=str(path), arguments=arguments, seconds=seconds)
