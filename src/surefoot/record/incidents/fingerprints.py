"""Fingerprints of tensors, to compare two runs of one step bit for bit.

The fingerprint of a tensor is the SHA-256 of its bytes, with its dtype and shape. All NaNs count as equal: their sign
and payload have no meaning, and processors do not define them.
"""

from __future__ import annotations

import hashlib
import math
from typing import TypedDict

import torch
from torch import Tensor

from surefoot.keep.checkpoint.tree import local_part


class Print(TypedDict, total=False):
    """The fingerprint of one tensor."""

    sha256: str
    dtype: str
    shape: list[int]
    norm: float
    nonfinite: int
    """The number of non-finite values."""
    value: float | str | None
    """The value of a loss."""


@torch.no_grad()
def print_of(tensor: Tensor) -> Print:
    """The fingerprint of one tensor, with its norm and its number of non-finite values. Waits for the device."""
    values = plain_values(tensor)
    found: Print = {
        "sha256": _digest(values),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }
    if values.is_floating_point() or values.is_complex():
        finite = values.isfinite()
        bad = values.numel() - int(finite.sum())
        kept = values if not bad else values[finite]
        wide = kept.to(torch.complex128 if values.is_complex() else torch.float64)
        found |= {"norm": float(torch.linalg.vector_norm(wide)) if wide.numel() else 0.0, "nonfinite": bad}
    return found


def plain_values(tensor: Tensor) -> Tensor:
    """The values on the host, as one dense block; for a DTensor, this process's shard."""
    tensor = local_part(tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _digest(values: Tensor) -> str:
    digest = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}\n".encode())
    if values.is_floating_point() and values.element_size() > 1 and bool(values.isnan().any()):
        values = torch.where(values.isnan(), torch.full_like(values, math.nan), values)
    if values.numel():
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
