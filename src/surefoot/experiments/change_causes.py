"""Which change is among the fixes of which cause, as the catalogue says, and what experiments do to the findings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

from surefoot.diagnose.catalogue import CATALOGUE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surefoot.diagnose.findings import Diagnosis, Finding


class ExperimentEvidence(TypedDict):
    """What the experiments say about a finding: `evidence["experiments"]`."""

    confirmed: bool
    """Whether a change that fixes the cause cured the run, and none that must fix it failed."""
    refuted: bool
    """Whether a change that must fix the cause did not."""
    cured_by: list[str]
    """The fixes that cured the run."""
    not_cured_by: list[str]
    """The fixes that did not."""


FIXES = {cause.code: dict(cause.cured_by) for cause in CATALOGUE.values() if cause.cured_by}
"""Cause, change, and the words of the catalogue's fix."""
MUST = {cause.code: cause.must_cure for cause in CATALOGUE.values() if cause.must_cure}
"""Changes that cure the run if the cause is the only one."""

_REFUTED = 0.5
"""What is left of the confidence."""
_DOUBT_LEFT = 0.25
"""What is left of the doubt."""


def weigh(
    diagnosis: Diagnosis, cures: list[str], failures: list[str], unmoved: list[str], refuted: Sequence[str] = ()
) -> Diagnosis:
    """The findings, weighed by the experiments: the confirmed come first, the refuted are less certain.

    `unmoved` are those failures that came at the very step at which the baseline failed; `refuted` are causes that
    something else speaks against.
    """
    judged = [
        _refuted(each) if each.cause in refuted else _weigh_one(each, cures, failures, unmoved)
        for each in diagnosis.findings
    ]
    order = sorted(range(len(judged)), key=lambda i: (-_standing(judged[i]), i))
    return replace(diagnosis, findings=tuple(judged[i] for i in order))


def confirm(diagnosis: Diagnosis, cause: str, probe: str) -> Diagnosis:
    """The findings, one of which a probe confirms, if it is among the serious ones: that comes first."""
    judged = [_confirmed(each, probe) if each.cause == cause else each for each in diagnosis.findings]
    order = sorted(range(len(judged)), key=lambda i: (-_standing(judged[i]), i))
    return replace(diagnosis, findings=tuple(judged[i] for i in order))


def _confirmed(finding: Finding, probe: str) -> Finding:
    outcome: ExperimentEvidence = {"confirmed": True, "refuted": False, "cured_by": [probe], "not_cured_by": []}
    confidence = min(0.99, 1.0 - (1.0 - finding.confidence) * _DOUBT_LEFT)
    return replace(finding, confidence=confidence, evidence={**finding.evidence, "experiments": outcome})


def _refuted(finding: Finding) -> Finding:
    outcome: ExperimentEvidence = {"confirmed": False, "refuted": True, "cured_by": [], "not_cured_by": []}
    evidence = {**finding.evidence, "experiments": outcome}
    return replace(finding, confidence=_REFUTED * finding.confidence, evidence=evidence)


def _weigh_one(finding: Finding, cures: list[str], failures: list[str], unmoved: list[str]) -> Finding:
    fixes = FIXES.get(finding.cause, {})
    cured = [name for name in cures if name in fixes]
    failed = [name for name in failures if name in fixes]
    if not cured and not failed:
        return finding
    refuted = [name for name in unmoved if name in MUST.get(finding.cause, ())]
    confidence = finding.confidence
    if refuted:
        confidence *= _REFUTED
    elif cured:
        confidence = min(0.99, 1.0 - (1.0 - confidence) * _DOUBT_LEFT)
    outcome: ExperimentEvidence = {
        "confirmed": bool(cured) and not refuted,
        "refuted": bool(refuted),
        "cured_by": cured,
        "not_cured_by": failed,
    }
    return replace(finding, confidence=confidence, evidence={**finding.evidence, "experiments": outcome})


def _standing(finding: Finding) -> int:
    """Serious and confirmed, serious, serious but refuted, mere remark."""
    if finding.severity == "info":
        return 0
    outcome = finding.evidence.get("experiments", {})
    return 3 if outcome.get("confirmed") else 1 if outcome.get("refuted") else 2


def speaks_for(cures: list[str], failures: list[str]) -> list[str]:
    """Causes whose fixes cured, and none of whose certain fixes failed."""
    return [
        code
        for code, fixes in FIXES.items()
        if any(name in fixes for name in cures) and not any(name in MUST.get(code, ()) for name in failures)
    ]
