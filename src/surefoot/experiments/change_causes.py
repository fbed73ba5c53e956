"""Which change fixes which cause, according to the catalogue, and how experiments affect the findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

from surefoot.diagnose.catalogue import CATALOGUE

if TYPE_CHECKING:
    from surefoot.diagnose.findings import Diagnosis, Finding


class ExperimentEvidence(TypedDict):
    """The result of the experiments for one finding: `evidence["experiments"]`."""

    confirmed: bool
    """Whether a change that fixes the cause cured the run, and no change that must fix it failed to."""
    refuted: bool
    """Whether a change that must fix the cause did not cure the run."""
    cured_by: list[str]
    """The fixes that cured the run."""
    not_cured_by: list[str]
    """The fixes that did not."""


FIXES = {cause.code: dict(cause.cured_by) for cause in CATALOGUE.values() if cause.cured_by}
"""Maps a cause to its changes, and each change to the text of the catalogue's fix."""
MUST = {cause.code: cause.must_cure for cause in CATALOGUE.values() if cause.must_cure}
"""Changes that cure the run if this cause is the only one."""

_REFUTED = 0.5
"""The factor for the confidence of a refuted finding."""
_DOUBT_LEFT = 0.25
"""The factor for the remaining doubt (1 - confidence) of a confirmed finding."""


def weigh(
    diagnosis: Diagnosis, cures: list[str], failures: list[str], unmoved: list[str], refuted: Sequence[str] = ()
) -> Diagnosis:
    """The findings, reordered by the experiments: confirmed ones come first, refuted ones get a lower confidence.

    `unmoved` lists the failures at exactly the step at which the baseline failed. `refuted` lists causes that other
    evidence contradicts.
    """
    return _reordered(
        diagnosis,
        [
            _with_outcome(each, [], [], is_refuted=True)
            if each.cause in refuted
            else _weigh_one(each, cures, failures, unmoved)
            for each in diagnosis.findings
        ],
    )


def confirm(diagnosis: Diagnosis, cause: str, probe: str) -> Diagnosis:
    """The findings, with one that a probe confirms first if it is serious."""
    return _reordered(
        diagnosis, [_with_outcome(each, [probe], []) if each.cause == cause else each for each in diagnosis.findings]
    )


def _weigh_one(finding: Finding, cures: list[str], failures: list[str], unmoved: list[str]) -> Finding:
    fixes = FIXES.get(finding.cause, {})
    cured = [name for name in cures if name in fixes]
    failed = [name for name in failures if name in fixes]
    if not cured and not failed:
        return finding
    return _with_outcome(finding, cured, failed, any(name in MUST.get(finding.cause, ()) for name in unmoved))


def _with_outcome(finding: Finding, cured: list[str], failed: list[str], is_refuted: bool = False) -> Finding:
    """The finding with the outcome of the experiments, and the confidence that follows from it."""
    confidence = finding.confidence
    if is_refuted:
        confidence *= _REFUTED
    elif cured:
        confidence = min(0.99, 1.0 - (1.0 - confidence) * _DOUBT_LEFT)
    outcome: ExperimentEvidence = {
        "confirmed": bool(cured) and not is_refuted,
        "refuted": is_refuted,
        "cured_by": cured,
        "not_cured_by": failed,
    }
    return replace(finding, confidence=confidence, evidence={**finding.evidence, "experiments": outcome})


def _reordered(diagnosis: Diagnosis, findings: list[Finding]) -> Diagnosis:
    return replace(diagnosis, findings=tuple(sorted(findings, key=_standing, reverse=True)))


def _standing(finding: Finding) -> int:
    """Sort key: serious and confirmed, serious, serious but refuted, info."""
    if finding.severity == "info":
        return 0
    outcome = finding.evidence.get("experiments", {})
    return 3 if outcome.get("confirmed") else 1 if outcome.get("refuted") else 2


def causes_of_cures(cures: list[str], failures: list[str]) -> list[str]:
    """Causes that have a fix which cured the run, and no required fix that failed."""
    return [
        code
        for code, fixes in FIXES.items()
        if any(name in fixes for name in cures) and not any(name in MUST.get(code, ()) for name in failures)
    ]
