"""Evidence about an operation that made a bad value: its inputs, and the reason if it is visible in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from surefoot.core.wording import count_of
from surefoot.replay.locate.call import Call, bad_positions
from surefoot.replay.locate.describe import TensorDescription, count, describe

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.replay.locate.memory_writes import MemoryWrite

SOFTMAX = frozenset(
    (
        "_softmax", "softmax", "_log_softmax", "log_softmax", "logsumexp", "_logcumsumexp", "logcumsumexp",
        "_masked_softmax", "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)  # fmt: skip
_MOST_INPUTS = 8
_MOST_ROWS = 5


def inputs_of(call: Call) -> tuple[TensorDescription, ...]:
    """The tensors that went in, described."""
    return tuple(describe(name, value) for name, value in call.values[:_MOST_INPUTS])


def notes_on(call: Call, results: list[Tensor], own: list[Tensor | None] | None) -> tuple[str, ...]:
    """The explanation of the bad values; `own` marks those that this operation made itself."""
    notes = [*_masked_rows(call), *_limits(results), *_empty(call)]
    return (*notes, *_first_value(call, results, own))


def is_log_of_mask(call: Call, record: MemoryWrite) -> bool:
    """Whether a logarithm was taken of zeros and ones only: a way to write a mask."""
    if call.name not in ("log", "log_", "log2", "log10") or record.counts.nan:
        return False
    value = call.values[0][1]
    return value.numel() > 1 and bool(((value == 0) | (value == 1)).all()) and bool((value == 1).any())


def _masked_rows(call: Call) -> list[str]:
    if call.name not in SOFTMAX or "attention" in call.name:
        return []
    name, value = call.values[0]
    dim = call.settings.get("dim", -1)
    dim = dim[0] if isinstance(dim, list) and dim else dim
    if not isinstance(dim, int) or value.dim() == 0:
        return []
    rows = torch.isneginf(value).all(dim)
    if not rows.any():
        return []
    where = [tuple(int(i) for i in index) for index in rows.nonzero()[:_MOST_ROWS]]
    named = ", ".join(str(index[0]) if len(index) == 1 else str(list(index)) for index in where) or "the only one"
    total = int(rows.sum())
    more = f" and {total - len(where):,} more" if total > len(where) else ""
    return [f"{count_of(total, 'row')} of {name} all -Inf: {named}{more}"]


def _limits(results: list[Tensor]) -> list[str]:
    for value in results:
        if value.dtype in (torch.float16, torch.bfloat16) and count(value).total:
            name = str(value.dtype).removeprefix("torch.")
            return [f"{name} ends at {torch.finfo(value.dtype).max:,.6g}"]
    return []


def _empty(call: Call) -> list[str]:
    return [f"{name} is empty" for name, value in call.values if value.numel() == 0]


def _first_value(call: Call, results: list[Tensor], own: list[Tensor | None] | None) -> list[str]:
    """The first bad value of a pointwise operation, with the inputs at the same position."""
    if torch.Tag.pointwise not in getattr(call.func, "tags", ()) or len(results) != 1:
        return []
    bad = results[0]
    where = bad_positions(bad) if own is None else own[0]
    found = [] if where is None else where.nonzero()[:1].tolist()
    if not found:
        return []
    index = tuple(found[0])
    parts = []
    for name, value in call.values[:_MOST_INPUTS]:
        if value.layout == torch.strided and value.dtype != torch.bool:
            parts.append(f"{name} = {value.expand_as(bad)[index].item():.4g}")
    at = f"at {list(index)} " if index else ""
    return [f"first {at}of {', '.join(parts)}"]
