"""Measurements that need an extra backward pass: the gradient of each term of the loss, and whether a model has access
to future tokens.

Each runs over the script's own graph, keeps it, and writes to no `grad`. They run at a few steps only, and never if
they would call a hook of the script. The terms of graphs with more than 3,000 nodes are not computed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from surefoot.core.without_hooks import WithoutHooks
from surefoot.observe.tensors import measurable
from surefoot.record.facts import Causality, LossTerm
from surefoot.watch import autograd_graph as graph
from surefoot.watch.deferred import later, number, own
from surefoot.watch.operation_names import CLASS_LOSSES, VIEWS
from surefoot.watch.tensor_summary import SAMPLE, norms
from surefoot.watch.token_alignment import SHORTEST

if TYPE_CHECKING:
    from surefoot.record.facts import BackwardCall
    from surefoot.watch.function_recorder import FunctionRecorder
    from surefoot.watch.loss_calls import LossCalls
    from surefoot.watch.model_calls import Held, Output
    from surefoot.watch.parameter_registry import ParameterRegistry

MOST_NODES = 3_000
"""The terms of larger graphs are not computed."""
_LOSS_NAMES = {
    "cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss",
    "smooth_l1_loss", "huber_loss", "kl_div", "gaussian_nll_loss", "cosine_embedding_loss", "triplet_margin_loss",
}  # fmt: skip


def measure_terms(
    call: BackwardCall, recorder: FunctionRecorder | None, registry: ParameterRegistry, below: list[Any]
) -> list[LossTerm] | None:
    """The share of the gradient that each term of a summed loss contributes; `None` if it cannot be measured."""
    if recorder is None or call.entry is None or call.nodes > MOST_NODES:
        return None
    terms = _summands(recorder, _without_factor(recorder, call.entry))
    if not 2 <= len(terms) <= 6:
        return None
    targets = [
        tensor
        for number in call.parameters
        if (tensor := registry.parameters[number].tensor()) is not None and tensor.dim() > 1
    ]
    if not targets:
        return None
    nodes = {graph.number_of(node, recorder.mark): node for node in below}
    if any(entry.index not in nodes for entry, _, _ in terms):
        return None
    found = []
    for entry, tensor, result in terms:
        with WithoutHooks(grad=True):
            try:
                edge, one = GradientEdge(nodes[entry.index], result), torch.ones_like(tensor)
                grads = torch.autograd.grad(edge, targets, one, retain_graph=True, allow_unused=True)
            except RuntimeError:
                return None  # an earlier backward has freed a part of the graph
        with WithoutHooks():
            held = [g for g in grads if g is not None]
            norm = later(_total_norm, *norms(measurable(held)))
            del grads, held
            origin = next((e for e in recorder.history(entry.index, 40) if e.name in _LOSS_NAMES), None)
            found.append(
                LossTerm(
                    site=entry.site,
                    op=entry.name,
                    value=number(own(tensor)),
                    norm=norm,
                    loss=origin.name if origin else None,
                    loss_site=origin.site if origin else None,
                    loss_index=origin.index if origin else None,
                )
            )
    return found


def _total_norm(*parts: float) -> float:
    return math.sqrt(sum(norm * norm for norm in parts))


def _without_factor(recorder: FunctionRecorder, index: int) -> int:
    """The call that made what a loss is a multiple of: `(a + b) / rows` has the terms of the sum."""
    entry = recorder.entries[index]
    while entry.name in ("mul", "div") and len(entry.inputs) == 1 and recorder.entries[entry.inputs[0]].out_grad:
        index = entry.inputs[0]
        entry = recorder.entries[index]
    return index


def _summands(recorder: FunctionRecorder, index: int) -> list[tuple[Any, Tensor, int]]:
    """The scalars that a loss is the sum of: entry, value, and index among the results of its node."""
    entry = recorder.entries[index]
    if entry.name in ("add", "sub") or (entry.name in VIEWS and len(entry.inputs) == 1):
        parts = [i for i in entry.inputs if recorder.entries[i].out_grad and recorder.entries[i].out_shape == []]
        if entry.name in VIEWS or len(parts) >= 1:
            found: list[tuple[Any, Tensor, int]] = []
            for i in parts:
                found.extend(_summands(recorder, i))
            return found
    scalar = entry.notes.scalar
    return [(entry, *scalar)] if scalar is not None else []


class _Tokens(NamedTuple):
    """How the ids and the targets of a loss are aligned."""

    offset: int
    """The number of positions by which the targets are ahead of the ids: 1 or 0."""
    turned: bool
    """Whether time is the first dimension."""
    rows: int
    length: int
    targets: int


def measure_causality(
    recorder: FunctionRecorder | None, calls: LossCalls, held: list[Held], below: list[Any]
) -> Causality | None:
    """Whether an output of a next-token model depends on later inputs; `None` if this is not such a model."""
    if recorder is None or not held:
        return None
    loss = next((n for n in reversed(calls.losses) if n.op in CLASS_LOSSES and n.trained_on), None)
    if loss is None:
        return None
    target = calls.targets[loss.index].labels if loss.index in calls.targets else None
    if target is None:
        return None
    nodes = {number: node for node in below if (number := graph.number_of(node, recorder.mark)) is not None}
    for entry in recorder.entries:
        ids = entry.notes.ids if entry.name == "embedding" and entry.index in nodes else None
        tokens = None if ids is None else _tokens(ids, target, loss.ignore_index)
        if tokens is None:
            continue
        for each in held:
            fitting = [(out, at) for out in each.outputs if out.number in nodes and (at := _by_time(out.shape, tokens))]
            if not fitting:
                continue
            flow = _flow(*fitting[0], nodes[fitting[0][0].number], tokens, nodes[entry.index])
            past, future = flow if flow is not None else (None, None)
            return Causality(
                applies=flow is not None,
                from_past=past,
                from_future=future,
                positions=tokens.length if flow is not None else None,
                model=each.call.model,
                site=loss.site,
                offset=tokens.offset,
            )
    return None


def _tokens(ids: Tensor, target: Tensor, ignore: int | None) -> _Tokens | None:
    """The alignment of targets that equal the ids, or the ids one token later; `None` for other targets."""
    if ids.dim() != 2 or target.is_floating_point():
        return None
    for turned in (False, True):
        given = ids.t() if turned else ids
        count, length = given.shape
        width = target.numel() // max(1, count)
        if length < SHORTEST or target.numel() != count * width or width not in (length, length - 1):
            continue
        if target.dim() == 2 and list(target.shape) != ([width, count] if turned else [count, width]):
            continue
        goals = target.reshape(width, count).t() if turned else target.reshape(count, width)
        offset = _offset(given, goals, goals != (-100 if ignore is None else ignore))
        if offset is not None:
            return _Tokens(offset, turned, count, length, width)
    return None


def _offset(ids: Tensor, goals: Tensor, valid: Tensor) -> int | None:
    """The offset at which the targets that count equal the inputs: 1 or 0; `None` if they equal them at neither.

    A row of targets that is as long as its ids ends with a token that the ids do not have.
    """
    width, whole = goals.shape[1], goals.shape[1] == ids.shape[1]
    size = min(width, ids.shape[1] - 1)
    inner = valid[:, :size]
    shares = (
        ((goals[:, :size] == ids[:, 1 : 1 + size]) & inner).sum() / inner.sum().clamp_min(1),
        ((goals == ids[:, :width]) & valid).sum() / valid.sum().clamp_min(1),
    )
    following, same = torch.stack(shares).tolist()
    if following > (0.95 if whole else 0.99) and not (whole and same > 0.95):
        return 1
    return 0 if whole and same > 0.99 else None


def _by_time(shape: torch.Size, tokens: _Tokens) -> tuple[tuple[int, ...], int] | None:
    """The shape of an output with a time axis, and the index of that axis; `None` if it has none.

    Outputs are often flattened to a matrix with one row for each target.
    """
    rows, length = tokens.rows, tokens.length
    if len(shape) == 2 and shape[0] == rows * tokens.targets:
        return ((tokens.targets, rows, shape[1]), 0) if tokens.turned else ((rows, tokens.targets, shape[1]), 1)
    axes = {1: (rows, length), 2: (rows, None, length), 0: (length, rows)}
    for time in (0, 1, 2) if tokens.turned else (1, 2, 0):
        if len(shape) == 3 and all(size in (None, shape[i]) for i, size in enumerate(axes[time])):
            return tuple(shape), time
    return None


def _flow(
    out: Output, at: tuple[tuple[int, ...], int], made_by: Any, tokens: _Tokens, embedding: Any
) -> tuple[float, float] | None:
    """The gradient of the first half of the outputs for inputs of the first and of the second half."""
    shape, time = at
    cut = tokens.length // 2
    caught: list[Tensor] = []
    handle = embedding.register_prehook(lambda grads: caught.append(grads[0].detach()))
    table = next(variable for variable in (graph.leaf(n) for n, _ in embedding.next_functions) if variable is not None)
    with WithoutHooks(grad=True):
        given = torch.zeros(shape, dtype=out.dtype, device=out.device)
        _fill(given.narrow(time, 0, cut))
        edge = GradientEdge(made_by, out.result)
        try:
            torch.autograd.grad(edge, [table], given.view(out.shape), retain_graph=True, allow_unused=True)
        except RuntimeError:
            caught.clear()  # an earlier backward has freed a part of the graph
    handle.remove()
    if not caught:
        return None
    with WithoutHooks():
        flow = caught[0].float().abs().sum(-1)
        if flow.dim() != 2:
            return None
        flow = flow.t() if tokens.turned else flow
        return number(flow[:, :cut].mean()), number(flow[:, cut:].mean())


def _fill(early: Tensor) -> None:
    """Give every output a different weight, without a second tensor of that size."""
    done = 0
    for part in early.unbind(0) if early.numel() > SAMPLE else [early]:
        places = torch.arange(done, done + part.numel(), device=early.device, dtype=torch.float32)
        part.copy_(places.cos_().reshape(part.shape))
        done += part.numel()
