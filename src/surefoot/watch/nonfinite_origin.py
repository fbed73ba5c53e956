"""The origin of the first non-finite value, from the autograd graph of a non-finite loss.

The graph of a forward pass still holds the tensors that its operations saved. Going from the leaves upwards, the first
node that holds or must have made a non-finite value is the origin: a parameter that was already bad, a tensor from
outside the graph (data), or an operation outside its domain.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from surefoot.core.without_hooks import WithoutHooks
from surefoot.observe.readable import readable
from surefoot.record.facts import NonFiniteLoss
from surefoot.watch import autograd_graph as graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.parameter_registry import ParameterRegistry

_RESULT = re.compile(r"result\d*_?|out|output|log_?sumexp|attn_weight")
"""The names under which operations save their own results; `result2` of a norm layer is its inverse spread."""
_CLOSED = {"Add", "Sub", "Mul", "Neg", "View", "Reshape", "Mean", "Sum", "Select", "Slice", "Index", "Cat", "Stack",
           "Mm", "Addmm", "Bmm", "Convolution", "T", "Transpose", "Permute", "Squeeze", "Unsqueeze", "Rsub",
           "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "Relu", "Threshold", "NllLoss", "Abs"}  # fmt: skip
"""Operations whose results are finite for finite inputs, except for overflow."""


_OTHER_OPERAND = "the other operand"
"""The tensor of a finding that is concluded from the input and the result of an operation."""


class UndefinedValues(TypedDict, total=False):
    """Fields of `NonFiniteLoss` about an operation that was given values it is not defined for."""

    undefined_at: str
    bad: int
    lowest: float
    largest: float
    empty_count: bool
    masked_rows: int
    below: list[str]
    all_ignored: bool
    all_weightless: bool
    ignore_index: int


class NonFiniteCounts(TypedDict, total=False):
    """Fields of `NonFiniteLoss` about the non-finite tensor, and about its rows if it is data."""

    nan: int
    inf: int
    minus_inf: int
    shape: list[int]
    rows: list[int]
    bad_rows: int


class CallSites(TypedDict, total=False):
    """Fields of `NonFiniteLoss` about the line that called the operation."""

    site: str
    module: str
    call: str
    sites: list[str]


def find_origin(
    root: Tensor,
    value: float,
    registry: ParameterRegistry,
    origins: dict[str, list[tuple[str, str, str]]],
    follow: Callable[[NonFiniteLoss, Tensor | None], NonFiniteLoss] = lambda facts, tensor: facts,
) -> NonFiniteLoss:
    """What is known about the origin of a non-finite loss.

    Args:
        root: The loss.
        value: Its value.
        registry: The parameters and their names.
        origins: The lines that called operations, by kind of autograd node.
        follow: Adds the operations outside the graph to the facts about a tensor that is data.
    """
    with WithoutHooks():
        order = graph.leaves_first(root.grad_fn)
        leaves = [variable for node in order if (variable := graph.leaf(node)) is not None]
        bad_leaves = [each for each in leaves if not _finite(_held(each, registry))]
        are_known = all(readable(each) is not None for each in leaves)
        found = _first_bad_node(order, value)
    if bad_leaves:
        records = [registry.get(tensor) for tensor in bad_leaves]
        names = [registry.label(record) if record is not None else "a leaf tensor" for record in records]
        if found is None or any(record is not None and (record.optimizers or record.model) for record in records):
            return NonFiniteLoss(value=value, kind="parameter", parameters=names[:20], count=len(names))
        shape = list(bad_leaves[0].shape)
        return NonFiniteLoss(value=value, kind="data", tensor="a leaf that needs a gradient", shape=shape)
    if found is None or (not are_known and _is_concluded(found[1])):
        op = graph.op(root.grad_fn) if root.grad_fn is not None else None
        return NonFiniteLoss(value=value, kind="unknown", op=op)
    node, facts = found
    facts = replace(facts, **_call_sites(node, order, origins))
    return follow(facts, graph.saved(node).get(facts.tensor or "")) if facts.kind == "data" else facts


def _held(leaf: Tensor, registry: ParameterRegistry) -> Tensor:
    """What can be read of a leaf: for a gathered parameter that FSDP has freed again, this rank's shard."""
    record = registry.get(leaf) if readable(leaf) is None else None
    sharded = record.tensor() if record is not None else None
    return leaf if sharded is None else sharded


def _is_concluded(facts: NonFiniteLoss) -> bool:
    """Whether the origin is only concluded from finite inputs and a result that is not.

    A parameter that FSDP has freed may have been the other input, with its NaN in the shard of another rank.
    """
    is_operation = facts.kind == "operation" and facts.undefined_at is None and facts.dtype in ("float32", "float64")
    return is_operation or facts.tensor == _OTHER_OPERAND


def _first_bad_node(order: list[Any], loss: float) -> tuple[Any, NonFiniteLoss] | None:
    for node in order:
        op = graph.op(node)
        held = graph.saved(node)
        made = next((value for name, value in held.items() if _RESULT.fullmatch(name) and not _finite(value)), None)
        given = {name: value for name, value in held.items() if not _RESULT.fullmatch(name)}
        bad_given = {name: value for name, value in given.items() if not _finite(value) and not _is_mask(value)}
        outside = next(
            (pair for pair in bad_given.items() if pair[1].grad_fn is None and not pair[1].requires_grad), None
        )
        broken = _undefined(op, node, given)
        if broken is not None:
            return node, NonFiniteLoss(
                value=loss, kind="operation", op=op, inputs=_ranges(given), dtype=_dtype(held), **broken
            )
        if outside is not None and outside[1].dim() == 0:  # a number in the code, not a row of data
            words = f"a factor of {float(outside[1]):g}"
            return node, NonFiniteLoss(
                value=loss, kind="operation", op=op, dtype=_dtype(held), undefined_at=words, bad=1
            )
        if outside is not None and op != "Where":
            dtype = str(outside[1].dtype).removeprefix("torch.")
            return node, NonFiniteLoss(
                value=loss, kind="data", op=op, tensor=outside[0], dtype=dtype, **bad_rows(outside[1])
            )
        if bad_given:
            below = [n for n, _ in node.next_functions if n is not None and graph.leaf(n) is None]
            maker = below[0] if below else node
            return maker, _made_by(maker, next(iter(bad_given.values())), loss)
        if made is not None:
            return node, NonFiniteLoss(
                value=loss, kind="operation", op=op, inputs=_ranges(given), dtype=_dtype(held), **_count(made)
            )
    return None


def _made_by(node: Any, value: Tensor, loss: float) -> NonFiniteLoss:
    """The origin of a non-finite value that was found where it was used, and that `node` made."""
    op, held = graph.op(node), graph.saved(node)
    dtype = str(value.dtype).removeprefix("torch.")
    ranges = _ranges(held)
    low = dtype in ("float16", "bfloat16")
    if op in _CLOSED and not low and not _range_is_huge(held):
        # The input is finite and the output is not: the other operand, which is not in the graph, was not finite.
        return NonFiniteLoss(
            value=loss, kind="data", op=op, tensor=_OTHER_OPERAND, inputs=ranges, dtype=dtype, **bad_rows(value)
        )
    return NonFiniteLoss(value=loss, kind="operation", op=op, inputs=ranges, dtype=dtype, **_count(value))


def _undefined(op: str, node: Any, given: dict[str, Tensor]) -> UndefinedValues | None:
    """Evidence that the operation was given a value outside its domain."""
    check: Callable[[Any, dict[str, Tensor]], UndefinedValues | None] | None = _UNDEFINED.get(op)
    try:
        return check(node, given) if check is not None else None
    except (RuntimeError, KeyError, AttributeError, TypeError):
        return None


def _outside(
    words: str, is_outside: Callable[[Tensor], Tensor], shows_lowest: bool = True
) -> Callable[[Any, dict[str, Tensor]], UndefinedValues | None]:
    """A check for values of the input; its evidence has the lowest one, or else the largest magnitude."""

    def check(node: Any, given: dict[str, Tensor]) -> UndefinedValues | None:
        value = given["self"]
        bad = int(is_outside(value).sum())
        if not bad:
            return None
        if shows_lowest:
            return {"undefined_at": words, "bad": bad, "lowest": float(value.min())}
        return {"undefined_at": words, "bad": bad, "largest": float(value.abs().max())}

    return check


_log = _outside("values of 0 or less", lambda value: value <= 0)
_arc = _outside("values beyond ±1", lambda value: value.abs() > 1, shows_lowest=False)


def _div(node: Any, given: dict[str, Tensor]) -> UndefinedValues | None:
    value = given["other"]
    bad = int((value == 0).sum())
    if not bad:
        return None
    facts: UndefinedValues = {"undefined_at": "a divisor of 0", "bad": bad}
    if value.dim() == 0 and not value.requires_grad:
        facts["empty_count"] = True
    return facts


def _pow(node: Any, given: dict[str, Tensor]) -> UndefinedValues | None:
    value = given["self"]
    exponent = getattr(node, "_saved_exponent", None)
    if isinstance(exponent, Tensor):
        exponent = float(exponent.reshape(-1)[0])
    if exponent is None:
        return None
    bad = int((value == 0).sum()) if exponent < 0 else 0
    if float(exponent) != int(exponent):
        bad += int((value < 0).sum())
    return (
        {"undefined_at": f"base for exponent {exponent:g}", "bad": bad, "lowest": float(value.min())} if bad else None
    )


def _softmax(node: Any, given: dict[str, Tensor]) -> UndefinedValues | None:
    result = node._saved_result
    rows = torch.isnan(result).all(-1)
    bad = int(rows.sum())
    if not bad or bool(rows.all()):
        partial = int(torch.isnan(result).any(-1).sum())
        if not partial or partial != bad:
            return None
    below = [graph.op(n) for n, _ in node.next_functions if n is not None]
    near = _ops_near(node, 5)
    if near & {"MaskedFill", "Where", "Add", "Baddbmm", "Sub"}:
        return {"undefined_at": "rows with every key masked", "bad": bad, "masked_rows": bad, "below": below}
    return None


def _attention(node: Any, given: dict[str, Tensor]) -> UndefinedValues | None:
    mask = given.get("attn_mask", given.get("attn_bias"))
    if mask is None:
        return None
    blocked = ~mask if mask.dtype is torch.bool else mask == -math.inf
    bad = int(blocked.all(-1).sum())
    return {"undefined_at": "rows with every key masked", "bad": bad, "masked_rows": bad} if bad else None


def _nll(node: Any, given: dict[str, Tensor]) -> UndefinedValues | None:
    index = node._saved_ignore_index
    index -= 2**64 if index >= 2**63 else 0  # torch returns negative numbers as unsigned
    ignored = int((given["target"] == index).sum())
    if ignored == given["target"].numel():
        return {"undefined_at": "no target left", "bad": ignored, "all_ignored": True, "ignore_index": index}
    weight = given.get("weight")
    if weight is None:
        return None
    counted = given["target"][given["target"] != index]
    if bool((weight[counted] == 0).all()):
        return {"undefined_at": "no weight left", "bad": counted.numel(), "all_weightless": True}
    return None


def _exp(node: Any, given: dict[str, Tensor]) -> UndefinedValues | None:
    result = node._saved_result
    bad = int(torch.isinf(result).sum())
    return (
        {"undefined_at": "an exponent too large", "bad": bad} if bad and not bool(torch.isnan(result).any()) else None
    )


def _half_product(node: Any, given: dict[str, Tensor]) -> UndefinedValues | None:
    """A half-precision product that is beyond 65504 when it is computed again in single precision."""
    left = next((given[k] for k in ("self", "mat1") if k in given), None)
    right = next((given[k] for k in ("mat2", "other") if k in given), None)
    if left is None or right is None or left.dtype != torch.float16 or not (_finite(left) and _finite(right)):
        return None
    product = left.float() * right.float() if graph.op(node) == "Mul" else left.float() @ right.float()
    bad = int((product.abs() > 65504).sum())
    return {"undefined_at": "results beyond 65504", "bad": bad, "largest": float(product.abs().max())} if bad else None


_UNDEFINED: dict[str, Callable[[Any, dict[str, Tensor]], UndefinedValues | None]] = {
    "Log": _log, "Log2": _log, "Log10": _log, "Log1P": _outside("values of -1 or less", lambda value: value <= -1),
    "Acos": _arc, "Asin": _arc, "Acosh": _outside("values below 1", lambda value: value < 1),
    "Atanh": _outside("values at or beyond ±1", lambda value: value.abs() >= 1, shows_lowest=False),
    "Div": _div, "Pow": _pow,
    "Softmax": _softmax, "LogSoftmax": _softmax, "NllLoss": _nll, "NllLoss2D": _nll, "Exp": _exp,
    "ScaledDotProductFlashAttentionForCpu": _attention, "ScaledDotProductAttention": _attention,
    "Mm": _half_product, "Addmm": _half_product, "Bmm": _half_product, "Mul": _half_product,
    "ScaledDotProductEfficientAttention": _attention, "SafeSoftmax": _softmax,
}  # fmt: skip


def _ops_near(node: Any, depth: int) -> set[str]:
    found, level = set(), [node]
    for _ in range(depth):
        level = [n for parent in level for n, _ in parent.next_functions if n is not None]
        found |= {graph.op(n) for n in level}
    return found


def _call_sites(node: Any, order: list[Any], origins: dict[str, list[tuple[str, str, str]]]) -> CallSites:
    """The lines of the user's code that called this operation, matched by its position among operations of its kind."""
    op = graph.op(node)
    known = origins.get(op, [])
    if not known:
        return {}
    alike = [other for other in order if graph.op(other) == op]
    is_same = len(alike) == len(known) and node in alike
    # Of other operations than in the sampled step, only what holds for all of them is known.
    chosen = [known[alike.index(node)]] if is_same else known
    sites, modules, calls = ({each[field] for each in chosen} for field in range(3))
    facts: CallSites = {}
    if len(sites) == 1:
        facts["site"] = sites.pop()
    if len(modules) == 1:
        facts["module"] = modules.pop()
    if len(calls) == 1:
        facts["call"] = calls.pop()
    if len({place for place, _, _ in known}) > 1:
        facts["sites"] = sorted({place for place, _, _ in known})[:5]
    return facts


def _finite(value: Tensor) -> bool:
    local = readable(value)
    if local is None or not local.is_floating_point() or local.numel() == 0 or local.layout is not torch.strided:
        return True
    return math.isfinite(float(local.detach().float().sum())) or bool(torch.isfinite(local).all())


def _is_mask(value: Tensor) -> bool:
    """Whether it looks like an additive attention mask, which contains -inf on purpose."""
    return not bool(torch.isnan(value).any()) and bool(((value == 0) | (value == -math.inf)).all())


def _count(value: Tensor) -> NonFiniteCounts:
    return {
        "nan": int(torch.isnan(value).sum()),
        "inf": int(torch.isinf(value).sum()),
        "minus_inf": int((value == -math.inf).sum()),
        "shape": list(value.shape),
    }


def bad_rows(value: Tensor) -> NonFiniteCounts:
    """The number of non-finite values of a tensor, and the rows that contain them."""
    facts = _count(value)
    if value.dim() > 1:
        rows = (~torch.isfinite(value)).reshape(len(value), -1).any(1).nonzero().reshape(-1)
        facts["rows"] = rows[:10].tolist()
        facts["bad_rows"] = len(rows)
    return facts


def _ranges(held: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    found = {}
    for name, value in held.items():
        if value.is_floating_point() and value.numel():
            finite = value[torch.isfinite(value)].float()
            if finite.numel():
                found[name] = (float(finite.min()), float(finite.max()))
    return found


def _range_is_huge(held: dict[str, Tensor]) -> bool:
    return any(max(abs(low), abs(high)) > 1e18 for low, high in _ranges(held).values())


def _dtype(held: dict[str, Tensor]) -> str:
    return next((str(v.dtype).removeprefix("torch.") for v in held.values() if v.is_floating_point()), "")
