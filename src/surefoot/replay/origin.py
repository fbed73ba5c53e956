"""The first bad operation of a replayed step, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from surefoot.replay.locate.memory_writes import Phase
    from surefoot.replay.locate.result import NonFiniteOrigin


class OriginData(TypedDict):
    """The JSON of a `NonFiniteOrigin`; its fields are described there."""

    op: str
    phase: Phase
    module: str
    file: str
    line: int
    function: str
    source: str
    numel: int
    forward_op: str
    tensor: str
    path: list[str]
    outcomes: list[str]
    notes: list[str]
    text: str
    """All of it as a sentence."""


def as_data(found: NonFiniteOrigin | None) -> OriginData | None:
    """The fields that are words and numbers, and the sentence."""
    if found is None:
        return None
    return {
        "op": found.op,
        "phase": found.phase,
        "module": found.module,
        "file": found.file,
        "line": found.line,
        "function": found.function,
        "source": found.source,
        "numel": found.numel,
        "forward_op": found.forward_op,
        "tensor": found.tensor,
        "path": list(found.path),
        "outcomes": list(found.outcomes),
        "notes": list(found.notes),
        "text": str(found),
    }
