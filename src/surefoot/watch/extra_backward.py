"""Measurements that need an extra backward pass: the gradient of each term of the loss, and whether a model sees the
future.

Each runs over the script's own graph, keeps it, and writes to no `grad`. They run at a few steps only, and never if
they would call a hook of the script. The terms of graphs with more than 3,000 nodes are not computed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from surefoot.observe.tensors import measurable
from surefoot.record.facts import Causality, LossTerm
from surefoot.watch import autograd_graph as graph
from surefoot.watch.deferred import later, number, own
from surefoot.watch.operation_names import VIEWS
from surefoot.watch.script_hooks import WithoutHooks
from surefoot.watch.tensor_summary import SAMPLE, norms

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


def ask_terms(
    call: BackwardCall, recorder: FunctionRecorder | None, registry: ParameterRegistry, below: list[Any]
) -> list[LossTerm] | None:
    """How much of the gradient each term of a summed loss brings; `None` if that cannot be measured."""
    if recorder is None or call.entry is None or call.nodes > MOST_NODES:
        return None
    terms = _summands(recorder, call.entry)
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
                return None  # a part of the graph was used up by an earlier backward
        with WithoutHooks():
            held = [g for g in grads if g is not None]
            norm = later(_total_norm, *norms(measurable(held)))
            reach = len(held)
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
                    reach=reach,
                )
            )
    return found


def _total_norm(*parts: float) -> float:
    return math.sqrt(sum(norm * norm for norm in parts))


def _summands(recorder: FunctionRecorder, index: int) -> list[tuple[Any, Tensor, int]]:
    """The scalars a loss is the sum of: entry, value, and which result of its node it is."""
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


def ask_causality(
    recorder: FunctionRecorder | None, calls: LossCalls, held: list[Held], below: list[Any]
) -> Causality | None:
    """Whether an output of a next-token model depends on inputs that come after it; `None` if there is no such."""
    if recorder is None or not held:
        return None
    loss = next((n for n in reversed(calls.losses) if n.op == "cross_entropy" and n.trained_on), None)
    if loss is None:
        return None
    target = calls.targets[loss.index].labels if loss.index in calls.targets else None
    if target is None:
        return None
    nodes = {number: node for node in below if (number := graph.number_of(node, recorder.mark)) is not None}
    for model_call, _, outputs in held:
        out = next((output for output in outputs if len(output.shape) == 3 and output.number in nodes), None)
        if out is None:
            continue
        for entry in recorder.entries:
            if entry.name != "embedding" or entry.index not in nodes:
                continue
            ids = entry.notes.ids
            offset = None if ids is None or ids.dim() != 2 or ids.shape[1] < 4 else _offset(ids, target)
            if ids is None or offset is None:
                continue
            flow = _flow(out, nodes[out.number], ids, nodes[entry.index])
            applies = flow is not None
            past, future = flow if flow is not None else (None, None)
            positions = ids.shape[1] if applies else None
            return Causality(
                applies=applies,
                from_past=past,
                from_future=future,
                positions=positions,
                model=model_call.model,
                site=loss.site,
                offset=offset,
            )
    return None


def _offset(ids: Tensor, target: Tensor) -> int | None:
    """By how many positions the targets are ahead of the inputs: 1 or 0; `None` if they are something else."""
    if _is_next_token(ids, target):
        return 1
    is_same = target.numel() == ids.numel() and bool((target.reshape(ids.shape) == ids).float().mean() > 0.99)
    return 0 if is_same else None


def _is_next_token(ids: Tensor, target: Tensor) -> bool:
    """Whether the targets are the inputs, one later."""
    if target.is_floating_point() or target.numel() not in (ids.numel(), ids[:, 1:].numel()):
        return False
    if target.numel() == ids[:, 1:].numel():
        return bool((target.reshape(-1) == ids[:, 1:].reshape(-1)).float().mean() > 0.99)
    goals = target.reshape(ids.shape)
    same = (goals[:, :-1] == ids[:, 1:]).float().mean()
    return bool(same > 0.95) and not bool((goals == ids).float().mean() > 0.95)


def _flow(out: Output, made_by: Any, ids: Tensor, embedding: Any) -> tuple[float, float] | None:
    """The gradient of the first half of the outputs for inputs of the first and of the second half."""
    rows, length = ids.shape
    axes = {1: (rows, length), 2: (rows, None, length), 0: (length, rows)}
    time = next(
        (dim for dim, sizes in axes.items()
         if all(size in (None, out.shape[i]) for i, size in enumerate(sizes))), None
    )  # fmt: skip
    if time is None:
        return None
    cut = ids.shape[1] // 2
    caught: list[Tensor] = []
    handle = embedding.register_prehook(lambda grads: caught.append(grads[0].detach()))
    table = next(variable for variable in (graph.leaf(n) for n, _ in embedding.next_functions) if variable is not None)
    with WithoutHooks(grad=True):
        given = torch.zeros(out.shape, dtype=out.dtype, device=out.device)
        _fill(given.narrow(time, 0, cut))
        edge = GradientEdge(made_by, out.result)
        try:
            torch.autograd.grad(edge, [table], given, retain_graph=True, allow_unused=True)
        except RuntimeError:
            caught.clear()  # a part of the graph was used up by an earlier backward
    handle.remove()
    if not caught:
        return None
    with WithoutHooks():
        flow = caught[0].float().abs().sum(-1)
        if flow.dim() != 2:
            return None
        flow = flow if flow.shape[1] == ids.shape[1] else flow.t()
        return number(flow[:, :cut].mean()), number(flow[:, cut:].mean())


def _fill(early: Tensor) -> None:
    """Give every output a weight of its own, without a second tensor of that size."""
    done = 0
    for part in early.unbind(0) if early.numel() > SAMPLE else [early]:
        places = torch.arange(done, done + part.numel(), device=early.device, dtype=torch.float32)
        part.copy_(places.cos_().reshape(part.shape))
        done += part.numel()
