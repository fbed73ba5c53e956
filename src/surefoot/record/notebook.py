"""A loaded run as HTML for a notebook: the verdict and its findings, then alarms, then the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.core.notebook_html import heading, page, table, text

if TYPE_CHECKING:
    from surefoot.record.reading import RunTables

_SEVERITIES = ("error", "warning", "info")
_MOST_EVENTS = 20


def html_of(run: RunTables) -> str:
    """Self-contained and escaped."""
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
