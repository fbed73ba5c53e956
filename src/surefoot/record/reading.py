"""`load_run`: reads a run folder as tables, in whatever state its writer left it.

An incomplete last batch or line is dropped, and everything else that cannot be read is listed in `problems`, without an
exception. Files of a newer version of a format are refused with `UsageError`. Works while the run is being written, and
without torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.core.files import read_file
from surefoot.core.formats import FINDINGS, RUN, Format
from surefoot.core.notebook_html import heading, page, table, text
from surefoot.core.wording import count_of
from surefoot.errors import UsageError
from surefoot.record import events as event_file
from surefoot.record.arrays import Array, numbers, words
from surefoot.record.assemble import assemble
from surefoot.record.schema import TABLES, TableName
from surefoot.record.segments import FOLDER, SegmentName, read_segment, segments_in
from surefoot.record.sessions import FirstSteps, check_versions, first_steps

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import pyarrow as pa

    from surefoot.record.messages import Event


_MARKS = ("run.json", event_file.NAME, FOLDER)
"""A folder without any of these is not a run folder."""
TRIES = 10
"""The number of attempts when a file is thinned between being listed and being read."""


@dataclass(frozen=True)
class RunTables:
    """The content of a run folder. A table without rows still has its columns."""

    folder: Path
    run: dict[str, Any]
    """`run.json`: what was run, where, with which versions, how it ended."""
    events: list[Event]
    findings: dict[str, Any] | None
    """`findings.json`, if there was a diagnosis."""
    scalars: pa.Table
    """One row per optimizer step and part."""
    layers: pa.Table
    """One row per layer, sampled step and part."""
    histograms: pa.Table
    device: pa.Table
    """Readings of the devices and of the host, sorted by time."""
    dropped: int = 0
    """The number of messages that never reached the log: training was faster than the disk, or the disk was full."""
    problems: list[str] = field(default_factory=list)
    """What could not be read. A batch that a killed process left incomplete is the usual case."""

    def __repr__(self) -> str:
        verdict = "not diagnosed" if self.findings is None else self.findings.get("verdict", "unknown")
        sizes = {"step": self.scalars.num_rows, "layer row": self.layers.num_rows, "event": len(self.events)}
        counts = ", ".join(count_of(size, what) for what, size in sizes.items())
        return f"RunTables({str(self.folder)!r}: {verdict}, {counts})"

    def _repr_html_(self) -> str:
        return html_of(self)


def load_run(folder: str | os.PathLike[str]) -> RunTables:
    """The content of a run folder, as pyarrow tables."""
    path = Path(folder)
    _require_run_folder(path)
    check_versions(path)
    problems: list[str] = []
    events = _events(path, problems)
    pieces = read_pieces(path, problems)
    problems += lost_steps(pieces)
    tables: dict[Any, pa.Table] = assemble(by_table(pieces), first_steps(path))
    return RunTables(
        folder=path,
        run=_json(path / "run.json", RUN, problems) or {},
        events=events,
        findings=_json(path / "findings.json", FINDINGS, problems),
        dropped=sum(_dropped(event) for event in events),
        problems=problems,
        **tables,
    )


def is_run_folder(path: Path) -> bool:
    """Whether a run was ever logged here."""
    return any((path / mark).exists() for mark in _MARKS)


def read_pieces(path: Path, problems: list[str]) -> dict[SegmentName, pa.Table]:
    """The rows of every segment, in the order in which they were written. Thinning may happen at the same time."""
    for attempt in range(TRIES):
        wrongs: list[str] = []
        pieces: dict[SegmentName, pa.Table] = {}
        try:
            for name in segments_in(path):
                rows, wrong = _read(path, name, last=attempt == TRIES - 1)
                wrongs += [wrong] if wrong else []
                if rows is not None:
                    pieces[name] = rows
        except FileNotFoundError:  # its rows are now in the next level, which may have been read already
            continue
        break
    problems += wrongs
    return pieces


def by_table(pieces: dict[SegmentName, pa.Table]) -> dict[TableName, list[pa.Table]]:
    """Pieces with rows, sorted into tables."""
    return {table: [rows for name, rows in pieces.items() if name.table == table and rows.num_rows] for table in TABLES}


def lost_steps(pieces: dict[SegmentName, pa.Table]) -> list[str]:
    """The steps between the rows of a session and those of the next, in words: a killed process did not write them.

    Rows that were thinned, or are logged for some steps only, are not lost: both sessions must have consecutive rows
    there.
    """
    written = {name: rows for name, rows in pieces.items() if name.table == "scalars" and rows.num_rows}
    scalars = {name: rows.unify_dictionaries() for name, rows in written.items()}
    parts = sorted({part for rows in scalars.values() for part in words(rows, "part")})
    return [_lost(*span, part) for part in parts for span in _lost_spans(scalars, part)]


def _lost_spans(scalars: dict[SegmentName, pa.Table], part: str) -> Iterator[tuple[int, int]]:
    """The first and the last of lost steps."""
    columns = [_steps_of(name, rows, part) for name, rows in scalars.items()]
    steps, sessions, is_thinned = (np.concatenate(each) for each in zip(*columns, strict=True))
    for session in np.unique(sessions).tolist()[1:]:
        own = sessions == session
        first = int(steps[own].min())
        before = (sessions < session) & (steps < first)
        is_superseded = bool((steps[sessions > session] <= first).any())
        if is_superseded or not before.any() or (last := int(steps[before].max())) == first - 1:
            continue
        if _has(steps[before & ~is_thinned], last - 1, last) and _has(steps[own & ~is_thinned], first, first + 1):
            yield last + 1, first - 1


def _steps_of(name: SegmentName, rows: pa.Table, part: str) -> tuple[Array, Array, Array]:
    """The steps of a part in a segment, each with its session and whether steps between them were removed."""
    codes = [code for code, word in enumerate(words(rows, "part")) if word == part]
    steps = numbers(rows, "step")[np.isin(numbers(rows, "part"), codes)]
    return steps, np.full(len(steps), name.session), np.full(len(steps), name.level != "0")


def _has(steps: Array, *wanted: int) -> bool:
    return bool(np.isin(wanted, steps).all())


def _lost(first: int, last: int, part: str) -> str:
    which = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    owner = f" of {part}" if part else ""
    return f"the log has no rows for {which}{owner}: the process was killed before they were written"


def _read(folder: Path, name: SegmentName, last: bool) -> tuple[pa.Table | None, str]:
    path = folder / FOLDER / str(name)
    try:
        return read_segment(path, name.table, use_threads=True)
    except FileNotFoundError:
        if not last:
            raise
        return None, f"{path.name}: was deleted while it was read"
    except OSError as error:
        return None, f"{path.name}: {error}"


def _require_run_folder(path: Path) -> None:
    if is_run_folder(path):
        return
    way_out = "Pass the folder that was passed to `surefoot run --out` or `RunLog`."
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder. {way_out}")
    ranks = sorted(child.name for child in path.glob("rank*") if is_run_folder(child))
    if ranks:
        way_out = f"It contains one run for each of {len(ranks)} ranks: load {path / ranks[0]}, for example."
    raise UsageError(f"{path} is not a run folder: it contains none of {', '.join(_MARKS)}. {way_out}")


def _json(path: Path, known: Format, problems: list[str]) -> dict[str, object] | None:
    try:
        value = json.loads(read_file(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name}: {error}")
        return None
    if not isinstance(value, dict):
        problems.append(f"{path.name}: an object was expected; got {type(value).__name__}")
        return None
    found: dict[str, object] = known.read(value, str(path), unmarked=1)
    return found


def _events(path: Path, problems: list[str]) -> list[Event]:
    try:
        parsed, bad = event_file.parse_sessions(read_file(path / event_file.NAME))
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{event_file.NAME}: {error}")
        return []
    if bad:
        problems.append(f"{event_file.NAME}: {bad} {'line is' if bad == 1 else 'lines are'} invalid or incomplete")
    firsts = first_steps(path)
    return [event for event, session in parsed if not is_undone(event, session, firsts)]


def is_undone(event: Event, session: int, firsts: FirstSteps) -> bool:
    """Whether a later session began before the step of an event. It began with the checkpoint of its first step."""
    later = [first for (number, part), first in firsts.items() if number > session and part == event.part]
    if event.step is None or not later:
        return False
    return event.step > min(later) or (event.step == min(later) and event.event != "checkpoint")


def _dropped(event: Event) -> int:
    count = event.evidence.get("dropped", 0)
    return count if event.event == "drops" and isinstance(count, int) else 0


_SEVERITIES = ("error", "warning", "info")
_MOST_EVENTS = 20


def html_of(run: RunTables) -> str:
    """The run for a notebook: verdict and findings, then alarms, then the tables. Self-contained and escaped."""
    return page(*_diagnosis(run), *_alarms(run), *_contents(run), *(text(problem) for problem in run.problems))


def _diagnosis(run: RunTables) -> list[str]:
    found = run.findings
    if found is None:
        return [heading("not diagnosed", f"{run.folder}. Run: surefoot diagnose {run.folder}")]
    parts = [heading(str(found.get("verdict", "unknown")), f"{found.get('steps', 0):,} steps · {run.folder}")]
    findings = found.get("findings", [])
    if not findings:
        return [*parts, text(str(found.get("summary", "")))]
    rows = [(str(each.get("severity", "")), *_finding(each)) for each in findings]
    return [*parts, table(("severity", "cause", "step", "found", "what to change"), rows)]


def _finding(finding: dict[str, Any]) -> tuple[str, str, str, str]:
    step = finding.get("step")
    fixes = finding.get("fixes") or [""]
    return (
        f"{finding.get('cause', '')} ({finding.get('confidence', 0):.2f})",
        "" if step is None else f"{step:,}",
        str(finding.get("summary", "")),
        str(fixes[0]),
    )


def _alarms(run: RunTables) -> list[str]:
    alarms = [event for event in run.events if event.severity in _SEVERITIES[:2]]
    if not alarms:
        return []
    ranked = sorted(alarms, key=lambda event: _SEVERITIES.index(event.severity))
    rows = [
        (event.severity, "" if event.step is None else f"{event.step:,}", event.event, event.summary)
        for event in ranked[:_MOST_EVENTS]
    ]
    more = len(ranked) - len(rows)
    return [
        table(("alarm", "step", "event", "what happened"), rows),
        *([text(f"{more:,} more in `events`.")] if more else []),
    ]


def _contents(run: RunTables) -> list[str]:
    tables = {"scalars": run.scalars, "layers": run.layers, "histograms": run.histograms, "device": run.device}
    rows = [(name, f"{rows.num_rows:,}", ", ".join(rows.column_names)) for name, rows in tables.items()]
    return [table(("table", "rows", "columns"), rows)]
