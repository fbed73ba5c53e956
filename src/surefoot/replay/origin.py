"""The first bad operation of a replayed step, as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.replay.locate.result import NonFiniteOrigin


def as_data(found: NonFiniteOrigin | None) -> dict[str, Any] | None:
    """The fields that are words and numbers, and the sentence."""
    if found is None:
        return None
    kept = ("op", "phase", "module", "file", "line", "function", "source", "numel", "forward_op", "tensor")
    return {
        **{name: value for name, value in asdict(found).items() if name in kept},
        "path": list(found.path),
        "outcomes": list(found.outcomes),
        "notes": list(found.notes),
        "text": str(found),
    }
