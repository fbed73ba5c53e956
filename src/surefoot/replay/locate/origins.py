"""Go back from a bad result to its origin, and decide between several origins by experiment.

An operation is an origin if no input was bad, if it makes more bad values than its inputs explain, or if it made NaN
from intended infinities: a softmax over a row that is all -Inf. An infinity that the program requested (a mask) is not
an origin while it is only passed on; if it reaches the loss, it is.

With several origins, all are repaired first, and origins that then become visible are added, until the result is
finite. Then each is left bad alone: the earliest that makes the result bad by itself is the origin. So a logarithm of
zero in the padding, which is never used, is not reported instead of a later division by zero. A step that behaves
differently when run again (it takes its batch from an iterator, or branches on values) cannot be tested in this way;
the earliest candidate is then used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from surefoot.core.wording import count_of
from surefoot.replay.locate.call import Call, bad_positions, base_name
from surefoot.replay.locate.describe import TensorDescription, count, describe

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.replay.locate.find import OriginSearch
    from surefoot.replay.locate.memory_writes import MemoryWrite

_MOST_CANDIDATES = 6
_ROUNDS = 3


def origins(ends: Iterable[MemoryWrite], *, meant_too: bool) -> list[MemoryWrite]:
    """The candidates for the first bad operation behind some records, earliest first.

    They made a bad value that none of their inputs explains. If there are none, it is the operation that turned an
    intended infinity into NaN; if there is none either, with `meant_too`, the infinity itself.
    """
    reached = list(_ancestors(ends))
    meant = _meant_at(reached)
    found = [record for record in reached if record.born or (not record.parents and record not in meant)]
    found = found or [record for record in reached if record.parents and record.makes_nan]
    if not found and meant_too:
        found = [record for record in reached if not record.parents]
    return sorted(found, key=lambda record: (record.index >= 0, abs(record.index)))


def unsure(ends: Iterable[MemoryWrite]) -> bool:
    """Whether NaN was made where intended infinities were also inputs: there may then be two faults."""
    reached = list(_ancestors(ends))
    meant = _meant_at(reached)
    makers = [record for record in reached if record.parents and record.makes_nan]
    return any(record in meant for maker in makers for record in _ancestors([maker]))


def path(origin: MemoryWrite, ends: Iterable[MemoryWrite]) -> list[MemoryWrite]:
    """The shortest way from an origin to one of the ends, both included."""
    following: dict[MemoryWrite, MemoryWrite | None] = dict.fromkeys(ends)
    waiting = deque(following)
    while waiting and origin not in following:
        record = waiting.popleft()
        for parent in record.parents:
            if parent not in following:
                following[parent] = record
                waiting.append(parent)
    way = [origin]
    while (record_after := following.get(way[-1])) is not None:
        way.append(record_after)
    return way


def leads_to(origin: MemoryWrite, ends: Iterable[MemoryWrite]) -> bool:
    """Whether a bad value could get from an origin to one of the ends."""
    return any(record is origin for record in _ancestors(ends))


def _ancestors(ends: Iterable[MemoryWrite]) -> Iterable[MemoryWrite]:
    waiting = list(ends)
    seen: set[MemoryWrite] = set()
    while waiting:
        record = waiting.pop()
        if record not in seen:
            seen.add(record)
            yield record
            waiting += record.parents


def _meant_at(reached: list[MemoryWrite]) -> set[MemoryWrite]:
    """The intended infinities; a tensor of -Inf counts as a mask if a softmax made NaN from it."""
    softmax_choked = any(record.makes_nan and base_name(record.op) in SOFTMAX for record in reached)
    return {record for record in reached if record.meant or (record.mask_like and softmax_choked)}


def choose(first: OriginSearch, rerun: Callable[[set[int]], OriginSearch]) -> MemoryWrite:
    """The earliest candidate that alone makes the result bad; the earliest of all if that cannot be decided."""
    level = first.level
    candidates = first.candidates(level)
    rivals = _by_index(candidates)
    if first.error is not None:
        return candidates[0]
    for _ in range(_ROUNDS):
        repaired = rerun(set(rivals))
        if not _same_program(first, repaired, candidates[0]):
            return candidates[0]
        still = repaired.candidates(level)
        if repaired.error is None and not still:
            return _breaks_alone(rivals, level, rerun)
        rivals = {**_by_index(still), **rivals}
    return candidates[0]


def _breaks_alone(rivals: dict[int, MemoryWrite], level: int, rerun: Callable[[set[int]], OriginSearch]) -> MemoryWrite:
    in_order = sorted(rivals, key=lambda index: (index >= 0, abs(index)))
    if len(rivals) > 1:
        for index in in_order:
            if rerun(set(rivals) - {index}).candidates(level):
                return rivals[index]
    return rivals[in_order[0]]


def _by_index(candidates: list[MemoryWrite]) -> dict[int, MemoryWrite]:
    return {record.index: record for record in candidates[:_MOST_CANDIDATES]}


def _same_program(first: OriginSearch, again: OriginSearch, upto: MemoryWrite) -> bool:
    """Whether the step ran the same operations again up to the earliest candidate."""
    end = max(upto.index, 0) + 1
    same_values = again.recorder.mended.get(upto.index) == upto.counts
    return same_values and first.recorder.calls[:end] == again.recorder.calls[:end]


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
