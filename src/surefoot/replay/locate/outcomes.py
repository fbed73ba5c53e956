"""The results of a step that should be finite: its loss, its gradients, its weights, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from surefoot.core.nested import attributes_of, kind_of, leaves
from surefoot.replay.locate.describe import count, nonfinite_number

if TYPE_CHECKING:
    from surefoot.replay.locate.memory_writes import MemoryWrite
    from surefoot.replay.locate.names import Names
    from surefoot.replay.locate.recorder import OperationRecorder

_MOST_NODES = 100_000
LOSS, GRADIENT, WEIGHT, OTHER = LEVELS = range(
    4
)  # only others, such as returned logits, may contain the -Inf of a mask


class StepOutput(NamedTuple):
    """A bad result."""

    name: str
    ends: tuple[MemoryWrite, ...]
    """The operations that wrote it."""

    level: int
    """Earlier levels explain later ones: `LOSS`, `GRADIENT`, `WEIGHT`, `OTHER`."""


def find_loss(returned: Any) -> Tensor | None:
    """The loss in the return value of a step: named so, or the first scalar with a graph."""
    named = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    single = [value for value in _tensors(returned) if value.numel() == 1 and value.is_floating_point()]
    if isinstance(named, Tensor) and named.numel() == 1:
        return named
    return next((value for value in single if value.requires_grad), single[0] if single else None)


def was_run(loss: Tensor, ran: set[int]) -> bool:
    """Whether backward has already run through the graph of a loss."""
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None:
            continue
        if not hasattr(node, "variable") and int(node._sequence_nr()) in ran:
            return True
        fresh = [below for below, _ in node.next_functions if below is not None and below not in seen]
        seen.update(fresh)
        waiting += fresh
    return False


def outcomes_of(returned: Any, recorder: OperationRecorder, names: Names) -> list[StepOutput]:
    """Every bad result, the loss first."""
    return [*_returned(returned, recorder), *_gradients(recorder, names), *_kept(recorder, names)]


def _returned(returned: Any, recorder: OperationRecorder) -> Iterator[StepOutput]:
    loss = find_loss(returned)
    if nonfinite_number(returned) and recorder.left:
        yield StepOutput("loss", tuple(recorder.left), LOSS)
    for value in _tensors(returned):
        memory = recorder.writes.find(value)
        if memory is not None and count(value).total:
            ends = tuple(memory.writers) or ((memory.blank,) if memory.blank is not None else ())
            is_loss = value is loss
            if ends:
                yield StepOutput("loss", ends, LOSS) if is_loss else StepOutput("output", ends, OTHER)


def _gradients(recorder: OperationRecorder, names: Names) -> Iterator[StepOutput]:
    named = sorted(recorder.arrivals, key=lambda arrival: id(arrival.leaf) not in names.kinds)
    for arrival in named:
        yield StepOutput(f"the gradient of {names.leaf(arrival.leaf)}", arrival.writers, GRADIENT)


def _kept(recorder: OperationRecorder, names: Names) -> Iterator[StepOutput]:
    """Weights, buffers and optimizer state that the step itself made bad."""
    for what, tensor, strict in names.kept():
        memory = recorder.writes.find(tensor)
        writers = () if memory is None else tuple(each for each in memory.writers if each.index >= 0)
        if writers and count(tensor).total:
            yield StepOutput(what, writers, WEIGHT if strict else OTHER)


def _tensors(returned: Any) -> list[Tensor]:
    is_object = kind_of(returned) is None and hasattr(returned, "__dict__")
    return list(leaves(attributes_of(returned) if is_object and not isinstance(returned, Tensor) else returned))
