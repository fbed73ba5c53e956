"""The definition of a rule and of its claim."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.diagnose.findings import Evidence, Severity
    from surefoot.diagnose.run import RecordedRun

Kind = Literal["crash", "wiring", "value", "dynamics", "curve", "remark"]
"""The kind of evidence that a rule uses, strongest first."""


@dataclass(frozen=True)
class Claim:
    """The result of a rule."""

    confidence: float
    """The confidence, from 0 to 1."""
    summary: str
    """One sentence with names and numbers."""
    step: int | None = None
    """The step at which it happened or was detected."""
    where: tuple[str, ...] = ()
    """Layers, tensors, and places in the user's code."""
    evidence: Evidence = field(default_factory=dict)
    """The numbers that it is based on."""
    severity: Severity = "error"
    fixes: tuple[str, ...] = ()
    """Specific fixes for this run; the catalogue's fixes follow."""


@dataclass(frozen=True)
class Rule:
    """How one cause is recognised."""

    code: str
    """The cause, as a code of the catalogue."""
    kind: Kind
    """The kind of evidence that it uses."""
    find: Callable[[RecordedRun], Claim | None]
    """Returns a claim; `None` if evidence is missing or contradicts the cause."""
    explains: tuple[str, ...] = ()
    """Causes that are consequences of this one, if both are claimed. A trailing `*` covers a family."""
    from_steps: bool = False
    """Whether it needs only the numbers of the steps, which a stabilizer records too. Other rules are not run then."""
    dated: bool = False
    """Whether the claim's step is when it happened, not when it was detected: nothing later explains it."""
