"""How two tensors of the same name differ: how many values, where, by how many bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import torch
from torch import Tensor

from surefoot.record.incidents.contents import plain_values

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_TENSORS = 50


class TensorDifference(TypedDict, total=False):
    """How one loss or gradient differs between two runs of a step. Lists of two contain the value of each run."""

    norms: list[float | str | None]
    """The norms of a gradient, or the values of a loss."""
    nonfinite: list[int | None]
    """How many values are not finite."""
    shape: list[list[int]]
    """The shapes, if they or the dtypes differ."""
    dtype: list[str]
    """The dtypes, if they or the shapes differ."""
    values: int
    """How many values differ bit for bit."""
    of: int
    """How many values there are."""
    first: list[int]
    """The index of the first value that differs."""
    recorded: complex | str
    """That value in the record."""
    replayed: complex | str
    """That value in the replay."""
    bits: int
    """In how many bits the two values differ."""
    largest: float | str
    """The largest difference of two finite values."""


def differences(recorded: Mapping[str, Tensor], replayed: Mapping[str, Tensor]) -> dict[str, TensorDifference]:
    """For every tensor that is not bitwise equal: what differs. All NaN values count as equal."""
    found: dict[str, TensorDifference] = {}
    for name, then in recorded.items():
        now = replayed.get(name)
        if now is None:
            continue
        difference = _difference(plain_values(then), plain_values(now))
        if difference is not None:
            found[name] = difference
        if len(found) >= _MOST_TENSORS:
            break
    return found


def _difference(then: Tensor, now: Tensor) -> TensorDifference | None:
    if then.shape != now.shape or then.dtype != now.dtype:
        return {"shape": [list(then.shape), list(now.shape)], "dtype": [str(then.dtype), str(now.dtype)]}
    if then.is_complex():
        then, now = torch.view_as_real(then), torch.view_as_real(now)
    width = _WIDTHS[then.element_size()]
    bits = then.reshape(-1).view(width) ^ now.reshape(-1).view(width)
    different = bits != 0
    if then.is_floating_point():
        different &= ~(then.isnan() & now.isnan()).reshape(-1)
    count = int(different.sum())
    if not count:
        return None
    flat = int(different.nonzero()[0])
    first_then, first_now = then.reshape(-1)[flat].item(), now.reshape(-1)[flat].item()
    return {
        "values": count,
        "of": then.numel(),
        "first": [int(part) for part in _place(flat, then.shape)],
        "recorded": first_then,
        "replayed": first_now,
        "bits": bin(int(bits[flat]) & ((1 << 8 * then.element_size()) - 1)).count("1"),
        "largest": _largest(then, now),
    }


def _place(flat: int, shape: torch.Size) -> list[int]:
    place = []
    for length in reversed(shape):
        flat, rest = divmod(flat, length)
        place.append(rest)
    return place[::-1]


def _largest(then: Tensor, now: Tensor) -> float:
    distance = (then.double() - now.double()).abs()
    finite = distance[distance.isfinite()]
    return float(finite.max()) if finite.numel() else float("inf")
