"""The result of `find_nonfinite`, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from surefoot.replay.locate.call import base_name
from surefoot.replay.locate.frames import Place

if TYPE_CHECKING:
    from surefoot.replay.locate.describe import Counts, TensorDescription
    from surefoot.replay.locate.memory_writes import MemoryWrite, Phase


_MOST_OF_PATH = 8
_MOST_OUTCOMES = 4


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The first operation that made a non-finite value which reached the loss, a gradient or a weight."""

    op: str
    """The operation: `aten.log.default`; in backward with its node before it, `SqrtBackward0 -> aten.div.Tensor`. Of a
    tensor that was not finite before any operation: what it is and what it is called, `parameter emb.weight`."""

    phase: Phase
    """`forward`, `backward` or `optimizer`; `input` if a tensor was not finite before any operation."""

    module: str
    """The path of the module it ran in; empty outside of modules."""

    file: str
    """The file of the user's line that called it, in backward of the forward call; empty if not known."""

    line: int
    """The line; 0 if not known."""

    function: str
    """The function the line is in."""

    source: str
    """The text of the line."""

    counts: Counts
    """How many values of the output are NaN, Inf and -Inf."""

    numel: int
    """How many values the output has."""

    inputs: tuple[TensorDescription, ...]

    forward_op: str
    """In backward, the operation whose backward it is: `aten.sqrt.default`."""

    tensor: str
    """The name of a tensor that was not finite before any operation; otherwise empty."""

    path: tuple[str, ...]
    """The operations that the value passed through, from the first to what it reached."""

    outcomes: tuple[str, ...]
    """Everything it reached: `loss`, ``the gradient of `head.weight` ``, …"""

    notes: tuple[str, ...]
    """Explanations: completely masked rows, the limit of float16, …"""

    def __str__(self) -> str:
        text = self._before_any_operation() if self.phase == "input" else self._made()
        if self.inputs and self.phase != "input":
            text += f"; inputs: {', '.join(str(each) for each in self.inputs)}"
        if self.notes:
            text += f" ({'; '.join(self.notes)})"
        text += f". Passed on by: {' -> '.join(_shortened(self.path))}"
        if len(self.outcomes) > 1:
            shown = ", ".join(self.outcomes[:_MOST_OUTCOMES])
            more = len(self.outcomes) - _MOST_OUTCOMES
            text += f". Reached: {shown}" + (f" and {more:,} more" if more > 0 else "")
        return text

    def _made(self) -> str:
        inside = f" in `{self.module}`" if self.module else ""
        text = f"{self.op}{inside} ({self.phase}) made {self.counts} of {self.numel:,} values"
        if self.file:
            text += f" at {Place(self.file, self.line, self.function)} in `{self.function}`"
        if self.source:
            text += f": `{self.source}`"
        return text

    def _before_any_operation(self) -> str:
        kind = self.op.split(" ", 1)[0]
        subject = f"the {kind} `{self.tensor}`" if self.tensor else "an input of the step"
        if kind == "gradient":
            subject = f"the gradient of `{self.tensor}`, left from before the step,"
        about = str(self.inputs[0]).removeprefix(self.inputs[0].name).strip() if self.inputs else ""
        return f"{subject} has {self.counts} before any operation: {about}"


def make_result(
    origin: MemoryWrite, way: Sequence[MemoryWrite], outcomes: Sequence[str], notes: Sequence[str]
) -> NonFiniteOrigin:
    """The result of a record."""
    place = origin.place or Place("", 0, "")
    steps = [_step(record) for record in way]
    kept = [step for i, step in enumerate(steps) if i == 0 or step != steps[i - 1]]
    before = origin.phase == "input"
    return NonFiniteOrigin(
        op=f"{origin.node} -> {origin.op}" if origin.node else origin.op,
        phase=origin.phase,
        module=origin.module,
        file=place.file,
        line=place.line,
        function=place.function,
        source=place.source,
        counts=origin.counts,
        numel=origin.numel,
        inputs=origin.inputs,
        forward_op=origin.forward_op,
        tensor=origin.op.partition(" ")[2] if before else "",
        path=(*kept, *outcomes[:1]),
        outcomes=tuple(outcomes),
        notes=(*origin.notes, *notes),
    )


def _step(record: MemoryWrite) -> str:
    if record.phase == "input":
        return record.op.partition(" ")[2] or record.op
    return record.node or base_name(record.op)


def _shortened(steps: Sequence[str]) -> list[str]:
    if len(steps) <= _MOST_OF_PATH:
        return list(steps)
    half = _MOST_OF_PATH // 2
    return [*steps[:half], f"… {len(steps) - 2 * half} more", *steps[-half:]]


def as_data(found: NonFiniteOrigin | None) -> dict[str, object] | None:
    """The fields that are words and numbers, and all of it as a sentence, `text`, for JSON."""
    if found is None:
        return None
    words = {each.name: getattr(found, each.name) for each in fields(found) if each.name not in ("counts", "inputs")}
    lists = {name: list(value) for name, value in words.items() if isinstance(value, tuple)}
    return {**words, **lists, "text": str(found)}
