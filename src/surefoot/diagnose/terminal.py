"""The diagnosis as a few lines of text, for the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.diagnose.findings import Diagnosis, Finding

SHOWN = 3


def as_text(diagnosis: Diagnosis, folder: str) -> str:
    """The verdict, the findings that matter, and where the rest is."""
    serious = [finding for finding in diagnosis.findings if finding.severity != "info"]
    steps = f"{diagnosis.steps:,} step{'s' if diagnosis.steps != 1 else ''}"
    lines = ["", f"surefoot: {diagnosis.verdict} · {steps} · {folder}"]
    for finding in serious[:SHOWN]:
        lines.extend(_lines(finding))
    if len(serious) > SHOWN:
        lines.append(f"  … and {len(serious) - SHOWN} more: surefoot diagnose {folder}")
    remarks = [finding for finding in diagnosis.findings if finding.severity == "info"]
    if not serious:
        for finding in remarks[:2]:
            lines.append(f"  note: {finding.summary}")
    return "\n".join(lines)


def as_full_text(diagnosis: Diagnosis, folder: str) -> str:
    """The verdict and every finding, with its evidence and all its fixes."""
    steps = f"{diagnosis.steps:,} step{'s' if diagnosis.steps != 1 else ''}"
    lines = [f"{diagnosis.verdict} · {steps} · {folder}"]
    for finding in diagnosis.findings:
        lines.append("")
        lines.extend(_lines(finding)[: 3 if finding.step is not None or finding.where else 2])
        for key, value in finding.evidence.items():
            lines.append(f"    Evidence: {key.replace('_', ' ')} {_shown(value)}")
        lines.extend(f"    Fix {number}: {fix}" for number, fix in enumerate(finding.fixes, 1))
    if not diagnosis.findings:
        lines.append("  nothing to report")
    return "\n".join(lines)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        shown = ", ".join(_shown(item) for item in value[:12])
        return f"{shown}, … ({len(value)} in all)" if len(value) > 12 else shown
    if isinstance(value, dict):
        return "; ".join(f"{key} {_shown(item)}" for key, item in list(value.items())[:12])
    return str(value)


def _lines(finding: Finding) -> list[str]:
    lines = [f"  {finding.severity} · {finding.cause} · {finding.confidence:.2f}", f"    {finding.summary}"]
    at = [] if finding.step is None else [f"step {finding.step:,}"]
    shown = [*at, *finding.where[:4]]
    if shown:
        lines.append(f"    At: {', '.join(shown)}")
    if finding.fixes:
        lines.append(f"    Fix: {finding.fixes[0]}")
    return lines
