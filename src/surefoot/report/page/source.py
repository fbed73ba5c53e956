"""A run folder as the page needs it: its tables, events, findings and description, whatever wrote them.

A folder of several ranks is shown through its first rank, with the verdicts of the others beside it. A folder of
`surefoot bisect` is shown through its baseline, with the table of its experiments.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.core.files import read_file
from surefoot.core.formats import EXPERIMENTS, FACTS, FINDINGS, RUN
from surefoot.errors import UsageError
from surefoot.record.reading import RunTables, load_run
from surefoot.report.page.diagnosis import findings_of, reason_of, serious, verdict_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surefoot.report.page.sections import RankRow


_FORMATS = {"bisect.json": EXPERIMENTS, "facts.json": FACTS, "findings.json": FINDINGS, "run.json": RUN}


@dataclass(frozen=True)
class RunFolder(RunTables):
    """What a page is made of: the tables of a run, and what lies around them."""

    ranks: Sequence[RankRow] = ()
    """One entry per rank of a run of several: its name and its verdict."""
    experiments: Mapping[str, object] | None = None
    """What `surefoot bisect` tried, where the folder is one of its."""


def read_source(folder: str | Path) -> RunFolder:
    """Read a run folder. Raises `UsageError` for what is not one."""
    top = Path(folder)
    if not top.is_dir():
        raise UsageError(f"no run folder at {top}: expected what `surefoot run --out DIR` or a stabilizer's log wrote.")
    bisected = read_json(top / "bisect.json")
    if bisected is not None and (top / "baseline").is_dir():
        findings = read_json(top / "findings.json")
        return replace(read_source(top / "baseline"), folder=top, findings=findings, experiments=bisected)
    ranks = rank_folders(top)
    path = ranks[0] if ranks else top
    described = tuple(describe_rank(rank) for rank in ranks)
    if not _is_recorded(path):
        raise UsageError(
            f"{path} has neither telemetry/ nor run.json: either it is not a run folder, or the run was killed before "
            "it wrote anything. `surefoot serve` waits for a run that has yet to begin."
        )
    return RunFolder(**vars(load_run(path)), ranks=described)


def _is_recorded(path: Path) -> bool:
    """Whether a run was written here: its log, or at least its description."""
    return (path / "telemetry").is_dir() or (path / "events.jsonl").is_file() or (path / "run.json").is_file()


def rank_folders(top: Path) -> list[Path]:
    """The folders of a run's ranks, in order; none for a run of one process."""
    found = [path for path in top.glob("rank*") if path.is_dir() and re.fullmatch(r"rank\d+", path.name)]
    alone = (top / "run.json").is_file() or (top / "telemetry").is_dir()
    return [] if alone else sorted(found, key=lambda path: int(path.name[4:]))


def describe_rank(folder: Path) -> RankRow:
    """The name of a rank, its verdict and its main finding."""
    findings = read_json(folder / "findings.json")
    serious_findings = serious(findings_of(findings))
    summary = serious_findings[0]["summary"] if serious_findings else reason_of(findings)
    return {"name": folder.name, "verdict": verdict_of(findings), "summary": summary}


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or nothing where there is none that can be read. Raises `UsageError` for a newer version."""
    try:
        value = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    found: dict[str, Any] = _FORMATS[path.name].read(value, str(path), unmarked=1)
    return found
