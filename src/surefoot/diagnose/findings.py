"""The content of a diagnosis: findings with their evidence, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from surefoot.core import notebook_html
from surefoot.core.formats import FINDINGS
from surefoot.core.wording import count_of

Severity = Literal["error", "warning", "info"]
Outlook = Literal["healthy", "unstable", "broken", "unknown"]
Evidence: TypeAlias = "dict[str, Any]"
"""Numbers, names and steps, by name: any JSON value."""


@dataclass(frozen=True)
class Finding:
    """One cause that the facts support."""

    cause: str
    """A code of the catalogue."""
    severity: Severity
    confidence: float
    summary: str
    """One sentence with names and numbers."""
    step: int | None = None
    where: tuple[str, ...] = ()
    """Layers, tensors, and places in the user's code."""
    evidence: dict[str, Any] = field(default_factory=dict)
    fixes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The JSON form that users' scripts depend on."""
        return {
            "cause": self.cause,
            "severity": self.severity,
            "confidence": round(self.confidence, 3),
            "step": self.step,
            "where": list(self.where),
            "evidence": self.evidence,
            "summary": self.summary,
            "fixes": list(self.fixes),
        }


@dataclass(frozen=True)
class Diagnosis:
    """The verdict and the findings, best first."""

    verdict: Outlook
    steps: int
    findings: tuple[Finding, ...]
    reason: str = ""
    """For a run without a serious finding: what it was judged by, or why it cannot be judged."""

    left_out: str = ""
    """For a run with `--guard`: that steps were skipped, unless a finding says so."""

    saved_steps: int | None = None
    """For a run that has not ended and was judged by its log: the number of steps whose facts were saved."""

    @property
    def summary(self) -> str:
        """The first finding, or else the reason for the verdict; and whether steps were skipped."""
        first = self.serious[0].summary if self.serious else self.reason
        return f"{first} {self.left_out}".strip()

    @property
    def serious(self) -> tuple[Finding, ...]:
        """The findings above severity `info`."""
        return tuple(finding for finding in self.findings if finding.severity != "info")

    def __str__(self) -> str:
        from surefoot.diagnose.terminal import as_full_text

        return as_full_text(self)

    def _repr_html_(self) -> str:
        columns = ("severity", "cause", "step", "what was found", "what to change first")
        rows = [
            (each.severity, each.cause, "" if each.step is None else f"{each.step:,}", each.summary, *each.fixes[:1])
            for each in self.findings
        ]
        reason = "" if self.serious else f" · {self.summary}"
        head = notebook_html.heading(self.verdict, f"{count_of(self.steps, 'step')}{reason}")
        return notebook_html.page(head, notebook_html.table(columns, rows) if rows else "")

    def as_json(self) -> dict[str, Any]:
        """The JSON form that users' scripts depend on."""
        return {
            "schema": FINDINGS.version,
            "verdict": self.verdict,
            "steps": self.steps,
            "summary": self.summary,
            "findings": [finding.as_json() for finding in self.findings],
        }
