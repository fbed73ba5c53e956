"""Whether the rows of a batch affect each other's outputs inside a model, and in which call they begin to.

One extra backward starts at the outputs of the first half of the rows only. In a model that treats rows independently,
no gradient arrives at rows of the second half, in any intermediate result. Hooks on the nodes measure how much does;
the result nearest to the output that has such a gradient was given to the call that mixes the rows.

Not measured: results whose first dimension is not the rows, and batches with as many rows as another dimension has
elements, whose layout is ambiguous. Whether mixing is meant (BatchNorm, graph networks) is for the rules to decide.

Data that needs no gradient is mixed unseen by this. There, and for the last states of recurrent layers, the shapes are
enough: a reshape keeps the order of the values in memory, so it cannot swap the batch with the dimension before or
after it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from surefoot.core.without_hooks import WithoutHooks
from surefoot.record.facts import RowMixing
from surefoot.watch import autograd_graph as graph
from surefoot.watch.deferred import later
from surefoot.watch.extra_backward import MOST_NODES

if TYPE_CHECKING:
    from surefoot.watch.function_recorder import FunctionRecorder, RecordedCall
    from surefoot.watch.loss_calls import LossCalls
    from surefoot.watch.model_calls import Held, Output

FEWEST_ROWS = 4
_MOST_CALLS = 12
"""The maximum number of calls between a result with mixed rows and one with separate rows."""
_KEEP_ORDER = {"view", "reshape", "flatten", "unflatten", "view_as"}
_FROM_OTHERS = 1e-6
"""From this share of the gradient on, rows are mixed. Separate rows have a gradient of exactly 0."""


class _CallLink(NamedTuple):
    """A recorded call and the calls that it uses the results of, without references to tensors."""

    number: int
    name: str
    site: str
    module: str
    inputs: list[int]


class _Given(NamedTuple):
    """What is known about the batch before the gradients are."""

    model: str
    rows: int
    has_positions: bool


def measure_row_mixing(
    recorder: FunctionRecorder | None, calls: LossCalls, held: list[Held], below: list[Any]
) -> RowMixing | None:
    """Where rows of the batch begin to affect each other; `None` if they do not, or if it cannot be measured."""
    loss = next((loss for loss in reversed(calls.losses) if loss.trained_on and loss.index in calls.targets), None)
    if recorder is None or loss is None or len(below) > MOST_NODES:
        return None
    target = calls.targets[loss.index].shape
    nodes = {number: node for node in below if (number := graph.number_of(node, recorder.mark)) is not None}
    rows = target[0] if target else 0
    swapped = _swapped_by_reshape(recorder, loss.index, rows) if rows >= FEWEST_ROWS else None
    for each in reversed(held):
        for out in each.outputs:
            if out.number not in nodes or not _has_plain_rows(each.shape, rows) or not _has_plain_rows(out.shape, rows):
                continue
            flows = _flows(recorder, out, nodes, rows)
            if flows is None:
                return swapped
            recorded = [_without_tensors(entry) for entry in recorder.entries]
            given = _Given(each.call.model, rows, _has_positions(each, target))
            return later(partial(_first_mixing, given, recorded, list(flows), swapped), torch.stack([*flows.values()]))
    return swapped


def _swapped_by_reshape(recorder: FunctionRecorder, loss: int, rows: int) -> RowMixing | None:
    """The reshape before a loss that stands for a transposition of the batch."""
    for entry in recorder.history(loss, MOST_NODES):
        before, after = entry.in_shape or [], entry.out_shape or []
        if entry.name not in _KEEP_ORDER or entry.parameters or len(before) < 2 or len(after) < 2:
            continue
        if _leaves_first(before, after, rows) or _becomes_first(before, after, rows):
            return RowMixing(
                model=entry.module.partition(".")[0],
                rows=rows,
                has_positions=False,
                calls=[entry.name],
                site=entry.site,
                module=entry.module,
                shapes=[before, after],
            )
    return None


def _leaves_first(before: list[int], after: list[int], rows: int) -> bool:
    """Whether (rows, n, …) becomes (n, rows, …)."""
    return before[0] == rows and before[1] not in (1, rows) and after == [before[1], rows, *before[2:]]


def _becomes_first(before: list[int], after: list[int], rows: int) -> bool:
    """Whether (n, rows, …) becomes (rows, …). If n is a multiple of the rows, they may be part of it."""
    is_second = before[1] == rows and rows not in before[2:] and before[0] > 1 and before[0] % rows > 0
    return is_second and after[0] == rows and rows not in after[1:]


def _has_plain_rows(shape: torch.Size, rows: int) -> bool:
    return rows >= FEWEST_ROWS and len(shape) > 0 and shape[0] == rows and rows not in shape[1:]


def _has_positions(call: Held, target: torch.Size) -> bool:
    """Whether rows are sequences, of vectors or of ids, whose positions have no targets of their own."""
    is_sequence = len(call.shape) == 3 or (len(call.shape) == 2 and call.takes_ids)
    return is_sequence and call.shape[1] > 1 and target[1:2] != call.shape[1:2]


def _flows(recorder: FunctionRecorder, out: Output, nodes: dict[int, Any], rows: int) -> dict[int, Tensor] | None:
    """By call: the gradient of its result for rows of the first and of the second half of the batch.

    The gradient of the earliest result is requested, so no gradient of a parameter is computed.
    """
    reached = set(graph.nodes(nodes[out.number]))
    results = [e for e in recorder.entries if nodes.get(e.index) in reached and (e.out_shape or [0])[0] == rows]
    if not results or results[0].index == out.number:
        return None
    found: dict[int, Tensor] = {}
    first, later_ones = results[0], results[1:]
    handles = [nodes[e.index].register_prehook(partial(_note_flow, found, e)) for e in later_ones]
    try:
        with WithoutHooks(grad=True):
            given = torch.zeros(out.shape, dtype=out.dtype, device=out.device)
            early = given[: rows // 2]
            early.copy_(torch.arange(early.numel(), device=out.device, dtype=torch.float32).cos_().view_as(early))
            edges = GradientEdge(nodes[out.number], out.result), GradientEdge(nodes[first.index], 0)
            grads = torch.autograd.grad(edges[0], edges[1], given, retain_graph=True, allow_unused=True)
    except RuntimeError:
        return None  # an earlier backward has freed a part of the graph
    finally:
        for handle in handles:
            handle.remove()
    _note_flow(found, first, grads)
    return found if first.index in found else None


def _note_flow(found: dict[int, Tensor], entry: RecordedCall, grads: Any) -> None:
    gradient = next((g for g in grads if isinstance(g, Tensor) and list(g.shape) == entry.out_shape), None)
    if gradient is not None:
        with WithoutHooks():
            by_row = gradient.detach().reshape(len(gradient), -1).abs().sum(1, dtype=torch.float32)
            half = len(by_row) // 2
            found[entry.index] = torch.stack([by_row[:half].sum(), by_row[half:].sum()])


def _without_tensors(entry: RecordedCall) -> _CallLink:
    name = "index" if entry.kind == "Index" else entry.name  # `x[rows]` selects by a tensor, `x[-1]` does not
    return _CallLink(entry.index, name, entry.site, entry.module, entry.inputs)


def _first_mixing(
    given: _Given, calls: list[_CallLink], measured: list[int], swapped: RowMixing | None, flows: Tensor
) -> RowMixing | None:
    """The calls that turn a result with mixed rows into one with separate rows, the nearest to the output.

    If no gradient shows any, what shapes show.
    """
    # A result that no output depends on is left out: behind attention over the rows, the words of a row may not matter.
    flow = {index: (own, other) for index, (own, other) in zip(measured, flows.tolist(), strict=True) if own or other}
    mixed = {index for index, (own, other) in flow.items() if other > _FROM_OTHERS * own}
    if not mixed or min(flow) not in mixed:
        return swapped  # nothing, or a transposed result: at the beginning the rows are separate
    chain = _chain(calls, max(mixed), set(flow) - mixed)
    if not chain:
        return swapped
    own, other = flow[min(flow)]
    return RowMixing(
        **given._asdict(),
        calls=[call.name for call in chain],
        site=next((call.site for call in chain if call.site), ""),
        module=chain[0].module,
        from_own=own,
        from_others=other,
    )


def _chain(calls: list[_CallLink], start: int, separate: set[int]) -> list[_CallLink]:
    """The calls from a result to the next one with separate rows, if each uses the result of the one before."""
    found: list[_CallLink] = []
    last = start
    for call in calls[start + 1 :]:
        if last in call.inputs:
            found.append(call)
            if call.number in separate or len(found) == _MOST_CALLS:
                break
            last = call.number
    return found if found and found[-1].number in separate else []
