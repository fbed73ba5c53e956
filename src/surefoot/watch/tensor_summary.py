"""Numbers about a tensor, for the facts: small, finite JSON, taken without touching autograd or random numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from surefoot.observe.readable import readable
from surefoot.record.facts import RowDistribution, TensorSummary

SAMPLE = 1 << 20
"""Above this many elements, statistics are taken from an even sample."""


def sampled(tensor: Tensor) -> Tensor:
    """The flattened tensor, thinned evenly to at most `SAMPLE` elements."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() > SAMPLE:
        flat = flat[:: math.ceil(flat.numel() / SAMPLE)]
    return flat


def finite_or_none(value: Tensor) -> float | None:
    """A scalar tensor as a number; `None` if it is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


def describe(tensor: Tensor) -> TensorSummary:
    """Shape, type, range and moments. Moments are over the finite values; `nonfinite` counts the others."""
    facts = TensorSummary(
        shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), requires_grad=tensor.requires_grad
    )
    local = readable(tensor)
    if local is None or local.numel() == 0 or local.is_complex() or local.layout is not torch.strided:
        return facts
    values = sampled(local)
    if not values.is_floating_point():
        low, high = torch.aminmax(values.to(torch.int64))
        return replace(facts, min=int(low), max=int(high))
    values = values.float() if values.dtype != torch.float64 else values
    finite = torch.isfinite(values)
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
        zeros=float((values == 0).float().mean()),
    )


def rows_of(tensor: Tensor, dim: int) -> Tensor:
    """The tensor with dimension `dim` last, as a matrix of at most a million elements."""
    rows = tensor.detach().movedim(dim, -1).reshape(-1, tensor.shape[dim])
    limit = max(1, SAMPLE // max(1, rows.shape[1]))
    return rows[:: math.ceil(len(rows) / limit)] if len(rows) > limit else rows


def as_distribution(tensor: Tensor, dim: int) -> RowDistribution:
    """How close the rows along `dim` are to probabilities, and to log-probabilities."""
    rows = rows_of(tensor, dim).float()
    sums = rows.sum(1)
    return RowDistribution(
        rows=len(rows),
        classes=rows.shape[1],
        min=float(rows.min()),
        max=float(rows.max()),
        sum_error=float((sums - 1).abs().max()),
        log_sum_error=float(torch.logsumexp(rows, 1).abs().max()),
        argmax_classes=int(torch._unique2(rows.argmax(1))[0].numel()),
    )


def label_counts(labels: Tensor, limit: int = 256) -> dict[str, int] | None:
    """How often each label occurs; `None` if there are too many kinds to be labels."""
    values, _, counts = torch._unique2(labels.detach().reshape(-1), return_counts=True)
    if values.numel() > limit:
        return None
    return {str(value): count for value, count in zip(values.tolist(), counts.tolist(), strict=True)}


def fingerprints(rows: Tensor, limit: int = 4096) -> list[int]:
    """One number per row that equal rows share and others almost surely do not."""
    return [hash((first, second)) for first, second in row_sums(rows, limit).tolist()]


def row_sums(rows: Tensor, limit: int = 4096) -> Tensor:
    """Two weighted sums of each row, on the device of the rows; equal rows share them."""
    matrix = rows.detach()[:limit].reshape(min(len(rows), limit), -1)
    if matrix.shape[1] > 4096:
        matrix = matrix[:, :: math.ceil(matrix.shape[1] / 4096)]
    # The order of a sum depends on the number of rows: the last digits are rounded off, and two sums taken.
    return (torch.nan_to_num(matrix.double()) @ _weights(matrix.shape[1], rows.device)).float()


@lru_cache(maxsize=32)
def _weights(width: int, device: torch.device) -> Tensor:
    places = torch.arange(1, width + 1, dtype=torch.float64, device=device)
    return torch.stack([torch.cos(places * 1.2345), torch.cos(places * 0.7071)], dim=1)
