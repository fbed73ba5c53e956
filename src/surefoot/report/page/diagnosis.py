"""`findings.json` as the page can rely on it: whatever stands in the file, a finding has the fields of the contract."""

from __future__ import annotations

from typing import Any

from surefoot.diagnose.catalogue import CATALOGUE

_SEVERITIES = ("error", "warning", "info")
MOST_STEPS = 2**53
"""Beyond this a number is no step of any run, and no browser counts by one there."""
_VERDICTS = ("broken", "unstable", "healthy", "unknown")


def verdict_of(value: dict[str, Any] | None) -> str:
    """The verdict; empty where there is none."""
    found = (value or {}).get("verdict")
    return found if found in _VERDICTS else ""


def reason_of(value: dict[str, Any] | None) -> str:
    """Why a run could not be judged; empty for any other verdict."""
    return str((value or {}).get("summary") or "") if verdict_of(value) == "unknown" else ""


def steps_of(value: dict[str, Any] | None) -> int | None:
    """How many steps the diagnosis saw."""
    return _whole((value or {}).get("steps"))


def findings_of(value: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The findings, best first, each with the title its cause has in the catalogue."""
    found = (value or {}).get("findings")
    return [_finding(one) for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def serious(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are more than a remark."""
    return [finding for finding in findings if finding["severity"] != "info"]


def _finding(one: dict[str, Any]) -> dict[str, Any]:
    cause = str(one.get("cause") or "unknown")
    severity, confidence, evidence = one.get("severity"), one.get("confidence"), one.get("evidence")
    return {
        "cause": cause,
        "title": CATALOGUE[cause].title if cause in CATALOGUE else cause,
        "severity": severity if severity in _SEVERITIES else "warning",
        "confidence": confidence if isinstance(confidence, (int, float)) and 0 <= confidence <= 1 else None,
        "step": _whole(one.get("step")),
        "where": _words(one.get("where")),
        "evidence": evidence if isinstance(evidence, dict) else {"evidence": evidence} if evidence else {},
        "summary": str(one.get("summary") or ""),
        "fixes": _words(one.get("fixes")),
    }


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(word) for word in value if word is not None] if isinstance(value, list) else []


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if abs(value) < MOST_STEPS else None  # nor is NaN below it
