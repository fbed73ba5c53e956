"""`surefoot replay`: which script or target, two passes, and the verdict."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.diagnose.export.folder import usable
from surefoot.diagnose.replay.passes import Order, run_pass
from surefoot.diagnose.replay.verdict import Replayed, judge
from surefoot.errors import UsageError
from surefoot.launch.sites import is_users
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
        shutil.copytree(folder, kept, symlinks=True, copy_function=_link)
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
    """A second name for a file, or a copy where that cannot be. A pipe or a device is no part of an incident."""
    if not stat.S_ISREG(os.lstat(source).st_mode):
        return
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
    arguments = arguments or tuple(str(word) for word in _listed(recorded.get("arguments")))
    if recorded.get("module"):
        name = str(recorded["module"])
        recorded_here(_file_of(name), folder, f"the module {name!r}")
        return Order(folder, script=name, module=True, arguments=arguments, seconds=seconds)
    path = recorded.get("path")
    if not path or not isinstance(path, str):
        raise UsageError("the incident names no script: give --script train.py or --target module:function")
    if not os.path.isfile(path):
        raise UsageError(
            f"the recorded script {path!r} is not here: go to where it was started, or give --script or --target"
        )
    recorded_here(Path(path), folder, f"the script {path!r}")
    return Order(folder, script=path, arguments=arguments, seconds=seconds)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def recorded_here(file: Path | None, incident: Path, what: str) -> None:
    """Refuse to run what an incident names unless it is code of the user's own, below the working directory.

    An incident may come from a stranger, who could name `timeit` with code as its argument, or a script that came with
    the incident.
    """
    if file is not None:
        file = Path(os.path.realpath(file))
        here = file.is_relative_to(Path.cwd().resolve()) and not file.is_relative_to(incident.resolve())
        if here and is_users(str(file)):
            return
    raise UsageError(
        f"the incident names {what}, which is not yours, or not below the working directory, so it is not run. Go to "
        "where it was started, or say what to run: --script or --target"
    )


def _file_of(module: str) -> Path | None:
    """Where a module is, found without running anything; of a package's part, the package."""
    found = PathFinder.find_spec(module.partition(".")[0], [os.getcwd(), *sys.path])
    places = [] if found is None else [found.origin, *(found.submodule_search_locations or [])]
    return next((Path(place) for place in places if place and os.path.exists(place)), None)
