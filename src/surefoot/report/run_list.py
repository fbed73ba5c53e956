"""The run folders below a directory, newest first: for `surefoot runs`, and for commands without a folder argument."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from surefoot.core.files import read_file
from surefoot.diagnose.engine import judge_folder
from surefoot.errors import UsageError
from surefoot.record.events import NAME as EVENTS_FILE
from surefoot.record.events import parse_sessions
from surefoot.record.rank_file import rank_folders
from surefoot.record.reading import is_run_folder
from surefoot.record.segments import FOLDER
from surefoot.report.page.diagnosis import findings_of, serious, steps_of, verdict_of
from surefoot.report.page.source import read_json

RUNS = Path("runs")
"""Where `surefoot run` creates its folders, below the working directory."""
_WORST_FIRST = ("broken", "unstable", "unknown", "unfinished", "not diagnosed", "healthy")
DEPTH = 3
"""How many levels below a directory are searched: `runs/`, an experiment, a trial."""


class ListedRun(NamedTuple):
    """A run folder and a summary of its files."""

    folder: Path
    """The folder of the whole run, which may contain folders of ranks."""
    last_write: float
    """When something was last written, in seconds since 1970."""
    verdict: str
    """The verdict of the diagnosis; without one "unfinished" or "not diagnosed"; "not compared" if there are several
    ranks and each is healthy; "not readable" if a file is invalid."""
    steps: int | None
    cause: str
    """The cause of the first finding above severity `info`; empty if there is none."""


def newest_run(root: Path = RUNS) -> Path:
    """The run folder that was written to last. Raises `UsageError` if there is none."""
    found = max(_run_folders(root), key=_last_write, default=None)
    if found is None:
        raise UsageError(f"no run folder given, and none found below {root}{os.sep}. Pass the folder of a run.")
    return found


def list_runs(root: Path) -> list[ListedRun]:
    """Every run below a directory, the newest first. Raises `UsageError` if there is no such directory."""
    if not root.is_dir():
        raise UsageError(f"there is no directory {root}. Pass the directory that contains your run folders.")
    return sorted(map(_listed, _run_folders(root)), key=lambda run: run.last_write, reverse=True)


def _run_folders(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    if is_run_folder(root) or rank_folders(root):
        yield root
    elif depth and root.is_dir():
        for entry in _entries(root):
            if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
                yield from _run_folders(entry, depth - 1)


def _entries(root: Path) -> list[Path]:
    with suppress(OSError):
        return list(root.iterdir())
    return []


def _last_write(folder: Path) -> float:
    """The time of the newest file of the log, or of the folder itself."""
    places = [folder, *rank_folders(folder)]
    places += [place / "telemetry" for place in places]
    times = [0.0]
    for place in places:
        with suppress(OSError):  # it may be deleted at any time
            times += [
                entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(place) if not _is_report(entry)
            ]
    return max(times)


def _is_report(entry: os.DirEntry[str]) -> bool:
    """Whether this file was written by `surefoot report`, not by the run."""
    return entry.name.endswith(".html")


def _listed(folder: Path) -> ListedRun:
    """The entry of a run; for several ranks that were diagnosed one by one, that of the rank with the worst verdict.

    Ranks that are healthy each may still differ from each other, which only `surefoot diagnose` finds out.
    """
    try:
        places = rank_folders(folder) or [folder]
        if all(map(_is_of_guard, places)):
            return _judged(folder, places)
        found = min((_entry(folder, place) for place in places), key=_gravity)
        return found._replace(verdict="not compared") if found.verdict == "healthy" and len(places) > 1 else found
    except (OSError, UsageError):  # deleted in the meantime, or written by a newer version
        return ListedRun(folder, _last_write(folder), "not readable", None, "")


def _is_of_guard(place: Path) -> bool:
    """Whether a guard without a diagnosis of its own (a stabilizer, `attach`) wrote this folder."""
    if (place / "findings.json").exists() or not (place / FOLDER).is_dir():
        return False
    return "exit_code" not in (read_json(place / "run.json") or {})


def _judged(folder: Path, places: Iterable[Path]) -> ListedRun:
    """The entry of a guarded run, which is diagnosed now."""
    diagnosis = judge_folder(folder)[0]
    verdict = diagnosis.verdict if all(map(_has_end, places)) else "unfinished"
    cause = next((each.cause for each in diagnosis.findings if each.severity != "info"), "")
    return ListedRun(folder, _last_write(folder), verdict, diagnosis.steps, cause)


def _has_end(place: Path) -> bool:
    """Whether the last event is the end of the run: it was not killed, and is not running."""
    try:
        events = parse_sessions(read_file(place / EVENTS_FILE))[0]
    except FileNotFoundError:
        return False
    return bool(events) and events[-1][0].event in ("end", "halt")


def _entry(folder: Path, place: Path) -> ListedRun:
    findings, run = read_json(place / "findings.json"), read_json(place / "run.json")
    if findings is None:
        unfinished = run is not None and run.get("exit_code", 0) is None
        return ListedRun(folder, _last_write(folder), "unfinished" if unfinished else "not diagnosed", None, "")
    serious_findings = serious(findings_of(findings))
    cause = serious_findings[0]["cause"] if serious_findings else ""
    return ListedRun(folder, _last_write(folder), verdict_of(findings), steps_of(findings), cause)


def _gravity(run: ListedRun) -> int:
    """Sort key: the worst verdict comes first."""
    return _WORST_FIRST.index(run.verdict) if run.verdict in _WORST_FIRST else len(_WORST_FIRST)
