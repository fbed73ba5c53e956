"""The contents of a run folder for the page: its tables, events, findings and description.

A folder of several ranks has one diagnosis, maps of its ranks, and the charts of the rank that had the cause first, or
of the first rank. A folder of `surefoot bisect` is represented by its baseline, with the table of its experiments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.core.files import read_file
from surefoot.core.formats import EXPERIMENTS, FACTS, FINDINGS, RUN
from surefoot.diagnose.merged import diagnose_ranks
from surefoot.errors import UsageError
from surefoot.record.rank_file import rank_folders
from surefoot.record.rank_table import RankTable, read_rank_table
from surefoot.record.reading import RunTables, is_run_folder, load_run
from surefoot.report.page.diagnosis import findings_of, reason_of, serious, verdict_of

if TYPE_CHECKING:
    from surefoot.report.page.sections import RankRow


_FORMATS = {"bisect.json": EXPERIMENTS, "facts.json": FACTS, "findings.json": FINDINGS, "run.json": RUN}


@dataclass(frozen=True)
class RunFolder(RunTables):
    """The tables of a run, and the files around them."""

    ranks: Sequence[RankRow] = ()
    """One entry per rank of a run of several: its name and its verdict."""
    rank_table: RankTable | None = None
    """The numbers of all ranks; `None` for a run of one process."""
    experiments: Mapping[str, object] | None = None
    """The experiments, if the folder was written by `surefoot bisect`."""


def read_source(folder: str | Path) -> RunFolder:
    """Read a run folder. Raises `UsageError` if it is not one."""
    top = Path(folder)
    if not top.is_dir():
        raise UsageError(f"no run folder at {top}: expected one that `surefoot run` or a stabilizer with `log` wrote.")
    bisected = read_json(top / "bisect.json")
    if bisected is not None and (top / "baseline").is_dir():
        findings, baseline = read_json(top / "findings.json"), read_source(top / "baseline")
        script = bisected.get("script") or baseline.run.get("script")  # the baseline ran a copy, in a scratch folder
        run = baseline.run | {"script": script} if script else baseline.run
        return replace(baseline, folder=top, run=run, findings=findings, experiments=bisected)
    ranks = rank_folders(top)
    if any(map(is_run_folder, ranks)):
        return _source_of_ranks(top, [rank for rank in ranks if is_run_folder(rank)])
    path = ranks[0] if ranks else top
    if not is_run_folder(path):
        raise UsageError(
            f"{path} has neither telemetry/ nor run.json: either it is not a run folder, or the run was killed before "
            "it wrote anything. `surefoot serve` waits for a run that has yet to begin."
        )
    return RunFolder(**vars(load_run(path)))


def _source_of_ranks(top: Path, ranks: list[Path]) -> RunFolder:
    """Several ranks as one run."""
    findings = merged_findings(ranks)
    shown = shown_rank(ranks, findings)
    described = tuple(describe_rank(rank) for rank in ranks)
    tables = vars(load_run(shown)) | {"folder": top, "findings": findings}
    return RunFolder(**tables, ranks=described, rank_table=read_rank_table(ranks))


def merged_findings(ranks: Sequence[Path]) -> dict[str, Any] | None:
    """The merged diagnosis of several ranks; `None` while there is none."""
    try:
        return diagnose_ranks(ranks).as_json()
    except UsageError:
        return None


def shown_rank(ranks: Sequence[Path], findings: Mapping[str, Any] | None) -> Path:
    """The rank whose charts are shown: the one that had the cause first, or the first rank."""
    main = serious(findings_of(findings))[:1]
    number = main[0].get("evidence", {}).get("rank") if main else None
    return next((path for path in ranks if path.name == f"rank{number}"), ranks[0])


def describe_rank(folder: Path) -> RankRow:
    """The name of a rank, its verdict and its main finding."""
    findings = read_json(folder / "findings.json")
    serious_findings, verdict = serious(findings_of(findings)), verdict_of(findings)
    reason = "" if verdict == "healthy" else reason_of(findings)
    summary = serious_findings[0]["summary"] if serious_findings else reason
    return {"name": folder.name, "verdict": verdict, "summary": summary}


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; `None` if it cannot be read. Raises `UsageError` for a newer version."""
    try:
        value = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    found: dict[str, Any] = _FORMATS[path.name].read(value, str(path), unmarked=1)
    return found
