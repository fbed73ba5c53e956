"""How far two tensors of one name are apart: how many values, where, by how many bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.record.incidents.fingerprints import plain_values

if TYPE_CHECKING:
    from collections.abc import Mapping

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_TENSORS = 50


def differences(recorded: Mapping[str, Tensor], replayed: Mapping[str, Tensor]) -> dict[str, Any]:
    """For every tensor that is not bit for bit the same: what differs. NaN is NaN, whatever its bits."""
    found: dict[str, Any] = {}
    for name, then in recorded.items():
        now = replayed.get(name)
        if now is None:
            continue
        apart = _apart(plain_values(then), plain_values(now))
        if apart is not None:
            found[name] = apart
        if len(found) >= _MOST_TENSORS:
            break
    return found


def _apart(then: Tensor, now: Tensor) -> dict[str, Any] | None:
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
    apart = (then.double() - now.double()).abs()
    finite = apart[apart.isfinite()]
    return float(finite.max()) if finite.numel() else float("inf")
