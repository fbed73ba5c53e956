"""An examination as HTML for a notebook: failed checks first, then warnings, then the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.core.notebook_html import heading, page, table, text

if TYPE_CHECKING:
    from surefoot.doctor.checks import Check, Examination

_WORST_FIRST = ("fail", "warn", "skipped", "pass")


def html_of(examination: Examination) -> str:
    """Self-contained, escaped HTML."""
    ranked = sorted(examination.checks, key=lambda check: _WORST_FIRST.index(check.status))
    rows = [(check.status, f"{check.step} {check.name}", check.summary, _advice(check)) for check in ranked]
    return page(
        heading(examination.status, examination.verdict),
        table(("status", "check", "found", "what to change"), rows),
        *(text(note) for note in examination.notes),
    )


def _advice(check: Check) -> str:
    return f"{check.cause}: {check.fix}" if check.cause and check.fix else check.fix
