"""The results of the experiments: one row per run, a summary, the files for other programs, and the terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from surefoot.core.console import progress_bar
from surefoot.core.formats import EXPERIMENTS
from surefoot.core.wording import capital
from surefoot.record.run_folder import write_json

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from surefoot.diagnose.findings import Diagnosis
    from surefoot.experiments.run_comparison import RunReading

POINTS = 300
"""How many points of each loss curve are kept for the report."""
SURE = 0.9
"""A finding with at least this confidence is shown without guesses."""

Verdict = Literal["cures", "does not", "cannot tell", "does not apply", "tells", "not run", "fails", "healthy"]
Answer = Literal["healthy", "no harm", "cured", "not cured", "flaky", "undecided"]


@dataclass
class Row:
    """One run and its verdict."""

    name: str
    title: str
    kind: str
    verdict: Verdict
    why: str = ""
    reading: RunReading | None = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    draws: tuple[int, int] | None = None
    """How many other draws of random numbers failed, and how many were tried, if known."""

    @property
    def applied(self) -> bool:
        """Whether the run differed from the baseline."""
        return self.verdict not in ("does not apply", "not run") and self.name not in ("baseline", "repeat")

    def as_json(self) -> dict[str, object]:
        """For `bisect.json`; `outcome` is null if the run was not run or not judged."""
        held = self.reading
        return {
            "name": self.name,
            "title": self.title,
            "kind": self.kind,
            "applied": self.applied,
            "outcome": held.outcome if held else None,
            "verdict": self.verdict,
            "why": self.why,
            "notes": self.notes,
            "draws": None if self.draws is None else {"failed": self.draws[0], "tried": self.draws[1]},
            "steps": held.steps if held else 0,
            "failed_at": held.failed_at if held else None,
            "final_loss": held.end if held else None,
            "loss": [list(point) for point in thinned(held.losses)] if held else [],
            "seconds": round(self.seconds, 2),
        }


@dataclass
class Report:
    """The result of the command."""

    answer: Answer
    sentence: str
    rows: list[Row]
    diagnosis: Diagnosis
    """The diagnosis of the baseline, weighed by the experiments."""
    script: str = ""
    confirms: list[str] = field(default_factory=list)
    """Causes of the baseline's diagnosis that the experiments confirm."""
    speaks_for: list[str] = field(default_factory=list)
    """Causes whose fixes cured the run, whatever the diagnosis said."""
    conclusions: list[str] = field(default_factory=list)
    """Conclusions from all runs together, as sentences."""
    incident: str = ""
    """The name of the incident's folder, if the experiments were on an incident."""
    budget_s: float = 0.0
    seconds: float = 0.0
    jobs: int = 1

    @property
    def cures(self) -> list[str]:
        """Names of the changes that cure it, cheapest first."""
        return [row.name for row in self.rows if row.verdict == "cures"]

    @property
    def guesses(self) -> list[str]:
        """The causes that the cures suggest; none if a finding is certain.

        Many changes delay or prevent a failure. That does not outweigh what the facts show by line and value, unless an
        experiment contradicts it.
        """
        sure = (f for f in self.diagnosis.findings if f.severity != "info" and f.confidence >= SURE)
        return [] if any("experiments" not in finding.evidence for finding in sure) else self.speaks_for

    def as_json(self) -> dict[str, object]:
        """`bisect.json`."""
        return {
            "schema": EXPERIMENTS.version,
            "script": self.script,
            "incident": self.incident or None,
            "answer": self.answer,
            "sentence": self.sentence,
            "conclusions": self.conclusions,
            "cures": self.cures,
            "confirms": self.confirms,
            "speaks_for": self.speaks_for,
            "budget_s": self.budget_s,
            "seconds": round(self.seconds, 2),
            "jobs": self.jobs,
            "runs": [row.as_json() for row in self.rows],
        }

    def write(self, folder: Path) -> None:
        """`bisect.json` and `findings.json`."""
        write_json(folder / "bisect.json", self.as_json())
        write_json(folder / "findings.json", self.diagnosis.as_json())


def thinned(losses: list[tuple[int, float]], points: int = POINTS) -> list[tuple[int, float]]:
    """A curve with fewer points: the lowest and the highest of each interval. Non-finite values count as highest."""
    if len(losses) <= points:
        return losses
    size = math.ceil(2 * len(losses) / points)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(losses), size):
        part = losses[start : start + size]
        ends = {min(part, key=_height), max(part, key=_height)}
        kept.extend(sorted(ends, key=lambda point: point[0]))
    return kept


def _height(point: tuple[int, float]) -> float:
    return point[1] if math.isfinite(point[1]) else math.inf


def sentence(rows: list[Row]) -> str:
    """Which single changes cure the failure, and which do not."""
    cures = [row.title for row in rows if row.verdict == "cures"]
    others = [row.title for row in rows if row.verdict == "does not"]
    unsure = [row.title for row in rows if row.verdict == "cannot tell"]
    parts = []
    if cures:
        parts.append(f"{cures[0]} cures it")
        if cures[1:]:
            parts.append(f"so {'do' if len(cures) > 2 else 'does'} {_listed(cures[1:])}")
    else:
        parts.append("no single change that was tried cures it")
    if others:
        parts.append(f"{_listed(others)} {'do' if len(others) > 1 else 'does'} not")
    if unsure:
        parts.append(f"unclear: {_listed(unsure)}")
    missing = [row for row in rows if row.verdict == "not run"]
    if missing:
        parts.append(f"{len(missing)} {'was' if len(missing) == 1 else 'were'} not run")
    return "; ".join(parts) + "."


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


_MARKS = {"cures": "bold green", "does not": "red", "fails": "red", "healthy": "green", "tells": "cyan"}


@contextmanager
def progress(total: int, budget_s: float) -> Iterator[Callable[[str, str], None]]:
    """Show the beginning and the end of each run: a live line in a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield _print_line
        return
    with progress_bar() as bar:
        task = bar.add_task("baseline", total=total)
        running: list[str] = []

        def on_event(name: str, words: str) -> None:
            if words:
                running.remove(name)
                bar.console.print(f"{name}  {words}", highlight=False, markup=False)
            else:
                running.append(name)
            shown = f"{', '.join(running)} · {budget_s:g} s at most"
            bar.update(task, description=shown[-60:], advance=1 if words else 0)

        yield on_event


def _print_line(name: str, text: str) -> None:
    if text:
        print(f"surefoot: {name}: {text}", file=sys.stderr, flush=True)


def show(report: Report, folder: str, console: Console) -> None:
    """Print the report."""
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    table = Table("change", "outcome", "final loss", "steps", "failed at", "cures it?", box=None, pad_edge=False)
    for row in report.rows:
        mark = _MARKS.get(row.verdict)
        verdict = f"[{mark}]{row.verdict}[/{mark}]" if mark else f"[dim]{row.verdict}[/dim]"
        table.add_row(*_cells(row), verdict + (f": {escape(_why(row))}" if _why(row) else ""))
    console.print(table, highlight=False)
    console.print(f"\n[bold]{escape(capital(report.sentence))}[/bold]", highlight=False)
    for words in report.conclusions:
        console.print(escape(words), highlight=False)
    if report.confirms:
        console.print(f"This confirms {', '.join(report.confirms)}.", highlight=False)
    elif report.guesses:
        console.print(f"This suggests {', '.join(report.guesses[:4])}.", highlight=False)
    for words in _findings(report):
        console.print(Padding(escape(words.lstrip()), (0, 0, 0, len(words) - len(words.lstrip()))), highlight=False)
    console.print(f"{report.seconds:.0f} s of {report.budget_s:g} s · {escape(folder)}", style="dim", highlight=False)


def _findings(report: Report) -> list[str]:
    """The findings, with the fix of the first one."""
    serious = [finding for finding in report.diagnosis.findings if finding.severity != "info"]
    lines = [f"  {finding.cause} · {finding.confidence:.2f} · {finding.summary}" for finding in serious[:3]]
    first = next((each for each in serious[:1] if not each.evidence.get("experiments", {}).get("refuted")), None)
    if first is not None:
        fix = [f"    Fix: {first.fixes[0]}"] if first.fixes else []
        lines[1:1] = [*fix, f"    surefoot explain {first.cause}"]
    elif report.guesses:
        lines.append(f"    surefoot explain {report.guesses[0]}")
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    held: Any = row.reading
    if held is None:
        return row.title, "", "", "", ""
    end = f"{held.end:.4g}" if math.isfinite(held.end) else "-"
    failed = "" if held.failed_at is None or not held.fails else f"{held.failed_at:,}"
    return row.title, held.outcome, end, f"{held.steps:,}", failed


def _why(row: Row) -> str:
    notes = f" ({'; '.join(row.notes)})" if row.notes else ""
    return f"{row.why}{notes}"
