"""A 64-bit fingerprint of a tensor's bits: equal for equal tensors on every rank, device and kernel.

The bits are read as integers, each is multiplied by an odd weight that depends on its position, and the products are
added modulo 2**64. Integer addition has no rounding, so the order of the additions does not matter, and one changed
element always changes the sum. Nothing waits for the device: the result stays on it.

Floating-point sums are not suitable: two devices may round them differently. A cryptographic hash would need the bytes
on the host. Not covered: positions count modulo 65,536, so swapping two elements at such a distance is not detected.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from surefoot.core.device_copies import upload
from surefoot.observe.readable import is_sharded, readable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_PERIOD = 1 << 16
"""The number of elements after which the weights repeat."""
_AT_ONCE = 1 << 22
"""The number of elements read at once on a device: each becomes an integer of 8 bytes."""
_AT_ONCE_ON_CPU = _PERIOD
"""The same on the CPU, where the integers should stay in its cache: a quarter of the time."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER, _STEP = 6364136223846793005, 1442695040888963407
"""Knuth's linear congruential generator (MMIX), which generates the weights."""


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """One integer on the tensor's device. The tensor must be plain, dense and readable."""
    words = _words(tensor)
    if not words.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    total: Tensor | None = None
    for part in torch.split(words, _AT_ONCE_ON_CPU if words.device.type == "cpu" else _AT_ONCE):
        found = _weighted(part)
        total = found if total is None else total + found
    assert total is not None
    return total


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """The fingerprints of several tensors in one vector on `device`.

    Tensors that cannot be compared between ranks count as 0: `None`, sharded and sparse tensors, and those whose memory
    was freed.
    """
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    found = []
    for tensor in tensors:
        local = None if tensor is None or is_sharded(tensor) else readable(tensor)
        if local is None or local.layout is not torch.strided:
            found.append(nothing)
        else:
            found.append(fingerprint(local).to(device, non_blocking=True))
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=device)


@torch.no_grad()
def state_fingerprints(optimizer: Any, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """One number per parameter in one vector on `device`: for all optimizer state of it that has dimensions."""
    found = torch.zeros(len(parameters), dtype=torch.int64, device=device)
    states: list[dict[Any, Any]] = [optimizer.state.get(each, {}) for each in parameters]
    names = {str(key) for state in states for key, value in state.items() if _has_dimensions(value)}
    for number, name in enumerate(sorted(names)):
        values = [value if _has_dimensions(value := state.get(name)) else None for state in states]
        found = found * 3 + fingerprints(values, device) + number
    return found


def _has_dimensions(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _words(tensor: Tensor) -> Tensor:
    """The bits as a vector of integers."""
    local = tensor.detach()
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    flat = local.reshape(-1)
    return flat.view(_WORDS[flat.element_size()])


def _weighted(words: Tensor) -> Tensor:
    """The sum of the products. The weights are 64-bit integers, and so is a product with a smaller word."""
    weights = _weights(words.device)
    count = words.numel()
    if count <= _PERIOD:
        return (words * weights[:count]).sum()
    whole = count - count % _PERIOD
    total = (words[:whole].view(-1, _PERIOD) * weights).sum()
    return total if whole == count else total + (words[whole:] * weights[: count - whole]).sum()


@cache
def _weights(device: torch.device) -> Tensor:
    """The same odd numbers on every rank."""
    numbers, state = [], 1
    for _ in range(_PERIOD):
        state = (state * _MULTIPLIER + _STEP) % (1 << 64)
        numbers.append((state ^ (state >> 33)) | 1)
    signed = [number - (1 << 64) if number >= 1 << 63 else number for number in numbers]
    return upload(signed, device)
