"""Numbers about a tensor, for the facts: small, finite JSON, taken without touching autograd or random numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from surefoot.observe.readable import readable
from surefoot.record.facts import RowDistribution, TensorSummary
from surefoot.watch.deferred import later, number, numbers, read, reads_at_once

COMPUTED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types that torch can compute with; others are converted first."""
SAMPLE = 1 << 20
"""Above this number of elements, statistics are computed from an even sample."""


def real(tensor: Tensor) -> Tensor:
    """The tensor; for a complex one, its real and imaginary parts."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def sampled(tensor: Tensor, most: int = SAMPLE) -> Tensor:
    """The flattened tensor, thinned evenly to at most `most` elements. A large tensor is not copied as a whole."""
    tensor = tensor.detach()
    size = tensor.numel()
    if size <= most:
        return tensor.reshape(-1)
    distance = math.ceil(size / most)
    if tensor.is_contiguous():
        return tensor.view(-1)[::distance]
    return torch.take(tensor, torch.arange(0, size, distance, device=tensor.device))


def finite_or_none(value: Tensor) -> float | None:
    """A scalar tensor as a number; `None` if it is not finite."""
    return later(_finite_or_none, value)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def describe(tensor: Tensor) -> TensorSummary:
    """Shape, type, range and moments. Moments are over the finite values; `nonfinite` counts the others."""
    return read(summary_of(tensor))


def summary_of(tensor: Tensor) -> TensorSummary:
    """The same as `describe`, but the numbers of a tensor on a device may be read later."""
    facts = TensorSummary(
        shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), requires_grad=tensor.requires_grad
    )
    local = readable(tensor)
    if local is None or local.numel() == 0 or local.is_complex() or local.layout is not torch.strided:
        return facts
    values = sampled(local)
    if not values.is_floating_point():
        low, high = torch.aminmax(values.to(torch.int64))
        return replace(facts, min=number(low), max=number(high))
    values = values.float() if values.dtype != torch.float64 else values
    finite = torch.isfinite(values)
    if not reads_at_once(values):
        return later(partial(_completed, facts), _moments_of(values, finite))
    bad = int(values.numel() - finite.sum())
    if bad:
        values = values[finite]
    if values.numel() == 0:
        return replace(facts, nonfinite=bad)
    low, high = torch.aminmax(values)
    return replace(
        facts,
        nonfinite=bad,
        min=float(low),
        max=float(high),
        mean=float(values.mean()),
        std=float(values.std(correction=0)),
    )


def _moments_of(values: Tensor, finite: Tensor) -> Tensor:
    """A vector: the number of non-finite values, and minimum, maximum, mean and standard deviation of the others."""
    count = finite.sum()
    mean = torch.where(finite, values, 0).sum() / count
    return torch.stack(
        [
            (values.numel() - count).to(values.dtype),
            torch.where(finite, values, math.inf).amin(),
            torch.where(finite, values, -math.inf).amax(),
            mean,
            (torch.where(finite, values - mean, 0).square().sum() / count).sqrt(),
        ]
    )


def _completed(facts: TensorSummary, moments: Tensor) -> TensorSummary:
    bad, low, high, mean, std = moments.tolist()
    if not math.isfinite(low):
        return replace(facts, nonfinite=int(bad))
    return replace(facts, nonfinite=int(bad), min=low, max=high, mean=mean, std=std)


def rows_of(tensor: Tensor, dim: int) -> Tensor:
    """The tensor with dimension `dim` last, as a matrix of at most a million elements."""
    moved = tensor.detach().movedim(dim, -1)
    width = tensor.shape[dim]
    count = moved.numel() // max(1, width)
    distance = distance_of_rows(count, width)
    if distance == 1:
        return moved.reshape(-1, width)
    if moved.is_contiguous():
        return moved.view(-1, width)[::distance]
    places = torch.arange(0, count, distance, device=tensor.device)
    index: list[Tensor] = []
    for size in reversed(moved.shape[:-1]):  # `torch.unravel_index` would wait for the device
        index.insert(0, places % size)
        places = places // size
    return moved[tuple(index)]  # copies only these rows


def distance_of_rows(count: int, width: int) -> int:
    """The distance between the rows that `rows_of` takes."""
    return max(1, math.ceil(count / max(1, SAMPLE // max(1, width))))


def columns_of(tensor: Tensor) -> Tensor:
    """The tensor. With more than a million elements, it is a matrix of its rows, with evenly thinned columns."""
    tensor = tensor.detach()
    width = tensor.numel() // max(1, len(tensor))
    if tensor.numel() <= SAMPLE or width == 1:
        return tensor
    distance = math.ceil(tensor.numel() / SAMPLE)
    if tensor.is_contiguous():
        return tensor.view(len(tensor), -1)[:, ::distance]
    starts = torch.arange(0, tensor.numel(), width, device=tensor.device)
    return torch.take(tensor, starts[:, None] + torch.arange(0, width, distance, device=tensor.device))


def few_of(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """The first `rows` rows of a batch, flattened and evenly thinned to at most `columns` columns."""
    few = tensor.detach()[:rows]
    width = few.numel() // max(1, len(few))
    distance = max(1, math.ceil(width / columns))
    if distance == 1 or few.is_contiguous():
        return few.reshape(len(few), -1)[:, ::distance]
    starts = torch.arange(0, few.numel(), width, device=few.device)
    return torch.take(few, starts[:, None] + torch.arange(0, width, distance, device=few.device))


def norms(tensors: list[Tensor], order: float = 2) -> list[Any]:
    """The norm of each tensor, at least in fp32; 0 if it is empty. With `order` 0, the number of nonzero values."""
    found: list[Any] = [0.0] * len(tensors)
    kinds: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(place)
    for (_, dtype), places in kinds.items():
        members = [tensors[place].detach() for place in places]
        wide = dtype in (torch.float32, torch.float64)
        members = members if dtype in COMPUTED else [real(member).float() for member in members]
        values = torch._foreach_norm(members, order, **({} if wide else {"dtype": torch.float32}))
        for place, value in zip(places, numbers(torch.stack(values)), strict=True):
            found[place] = value
    return found


def as_distribution(tensor: Tensor, dim: int) -> RowDistribution:
    """How close the rows along `dim` are to probabilities, and to log-probabilities."""
    rows = rows_of(tensor, dim).float()
    sums = rows.sum(1)
    return RowDistribution(
        rows=len(rows),
        classes=rows.shape[1],
        min=number(rows.min()),
        max=number(rows.max()),
        sum_error=number((sums - 1).abs().max()),
        log_sum_error=number(torch.logsumexp(rows, 1).abs().max()),
        column_error=_column_error(rows) if len(rows) == len(tensor) and tensor.dim() == 2 else None,
    )


def _column_error(rows: Tensor) -> float | None:
    """How far the columns of a matrix are from probabilities or log-probabilities; `None` for a few rows."""
    if len(rows) < 4:
        return None
    errors = torch.stack([rows.sum(0) - 1, torch.logsumexp(rows, 0)]).abs()
    error: float = number(errors.amax(1).min())
    return error


def label_counts(labels: Tensor, limit: int = 256) -> dict[str, int] | None:
    """How often each label occurs; `None` if there are too many different values to be labels."""
    values, _, counts = torch._unique2(labels.detach().reshape(-1), return_counts=True)
    if values.numel() > limit:
        return None
    return {str(value): count for value, count in zip(values.tolist(), counts.tolist(), strict=True)}


def fingerprints(rows: Tensor, limit: int = 4096) -> list[int]:
    """One number per row. Equal rows have equal numbers; different rows almost surely do not."""
    return read(prints_of_rows(rows, limit))


def prints_of_rows(rows: Tensor, limit: int = 4096) -> list[int]:
    """The same as `fingerprints`, but the numbers of a tensor on a device may be read later."""
    return later(_prints, row_sums(rows, limit))


def _prints(sums: Tensor) -> list[int]:
    return [hash((first, second)) for first, second in sums.tolist()]


def row_sums(rows: Tensor, limit: int = 4096) -> Tensor:
    """Two weighted sums of each row, on the device of the rows. Equal rows have equal sums."""
    matrix = few_of(rows, limit, 4096).double()
    # The order of a summation depends on the number of rows: the last digits are rounded off, and there are two sums.
    return (torch.nan_to_num(matrix) @ _weights(matrix.shape[1], matrix.device)).float()


@lru_cache(maxsize=32)
def _weights(width: int, device: torch.device) -> Tensor:
    places = torch.arange(1, width + 1, dtype=torch.float64, device=device)
    return torch.stack([torch.cos(places * 1.2345), torch.cos(places * 0.7071)], dim=1)
