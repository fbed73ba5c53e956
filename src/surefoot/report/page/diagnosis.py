"""Read `findings.json` for the page: whatever the file contains, a finding has the expected fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from surefoot.diagnose.catalogue import CATALOGUE

if TYPE_CHECKING:
    from surefoot.report.page.sections import FindingCard

_SEVERITIES = ("error", "warning", "info")
MOST_STEPS = 2**53
"""Larger numbers are not steps, and browsers cannot represent them exactly."""
_VERDICTS = ("broken", "unstable", "healthy", "unknown")


def verdict_of(value: Mapping[str, object] | None) -> str:
    """The verdict; empty if there is none."""
    found = (value or {}).get("verdict")
    return found if isinstance(found, str) and found in _VERDICTS else ""


def reason_of(value: Mapping[str, object] | None) -> str:
    """What a run without a serious finding was judged by, or why it could not be judged."""
    return str((value or {}).get("summary") or "") if verdict_of(value) in ("unknown", "healthy") else ""


def steps_of(value: Mapping[str, object] | None) -> int | None:
    """The number of steps in the diagnosis."""
    return _whole((value or {}).get("steps"))


def findings_of(value: Mapping[str, object] | None) -> list[FindingCard]:
    """The findings, best first, each with the title of its cause from the catalogue."""
    found = (value or {}).get("findings")
    return [_finding(one) for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def serious(findings: list[FindingCard]) -> list[FindingCard]:
    """The findings above severity `info`."""
    return [finding for finding in findings if finding["severity"] != "info"]


def _finding(one: Mapping[str, object]) -> FindingCard:
    cause = str(one.get("cause") or "unknown")
    severity, confidence, evidence = one.get("severity"), one.get("confidence"), one.get("evidence")
    return {
        "cause": cause,
        "title": CATALOGUE[cause].title if cause in CATALOGUE else cause,
        "severity": severity if isinstance(severity, str) and severity in _SEVERITIES else "warning",
        "confidence": confidence if isinstance(confidence, (int, float)) and 0 <= confidence <= 1 else None,
        "step": _whole(one.get("step")),
        "where": _strings(one.get("where")),
        "evidence": evidence if isinstance(evidence, dict) else {"evidence": evidence} if evidence else {},
        "summary": str(one.get("summary") or ""),
        "fixes": _strings(one.get("fixes")),
    }


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(item) for item in value if item is not None] if isinstance(value, list) else []


def _whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if abs(value) < MOST_STEPS else None  # NaN is not below it either
