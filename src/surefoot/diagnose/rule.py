"""What a rule is, and what it claims."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.diagnose.findings import Evidence, Severity
    from surefoot.diagnose.run import RecordedRun

Kind = Literal["crash", "wiring", "value", "dynamics", "curve", "remark"]
"""The kind of evidence a rule rests on, the strongest first."""


@dataclass(frozen=True)
class Claim:
    """What a rule found."""

    confidence: float
    """How sure it is, from 0 to 1."""
    summary: str
    """One sentence with names and numbers."""
    step: int | None = None
    """When it happened or was noticed."""
    where: tuple[str, ...] = ()
    """Layers, tensors, and places in the user's code."""
    evidence: Evidence = field(default_factory=dict)
    """The numbers it rests on."""
    severity: Severity = "error"
    """How bad it is."""
    fixes: tuple[str, ...] = ()
    """What to do here in particular; the catalogue's fixes follow."""


@dataclass(frozen=True)
class Rule:
    """How one cause is recognised."""

    code: str
    """The cause, as the catalogue names it."""
    kind: Kind
    """The kind of evidence it rests on."""
    find: Callable[[RecordedRun], Claim | None]
    """Looks for what the cause requires; `None` if something is missing or speaks against it."""
    explains: tuple[str, ...] = ()
    """Causes that are mere consequences of this one, if both are claimed. A trailing `*` covers a family."""
    dated: bool = False
    """The claim's step is when it happened, not when it was noticed: nothing that came later explains it."""
