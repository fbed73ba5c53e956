"""Counts the values of tensors in bins that are powers of two, on the device of the tensors.

A value's bin is its exponent, which is read from its bits: exact for every finite number, including subnormal ones, in
a few integer operations. `take_sample` copies an even sample of one tensor and counts the NaN and Inf in all of it;
`count` sorts many samples into bins at once, into one matrix that is copied to the host in one copy. Nothing waits for
the device, draws random numbers or is recorded by autograd.

Sparse tensors are represented by their stored values, sharded ones by the shard of this rank, complex ones by absolute
values. Not covered: tensors without values (meta, fake, lazy), nested and quantized ones, and wrappers of other
libraries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from surefoot.core.device import runs_triton
from surefoot.core.without_hooks import WithoutHooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

SAMPLE = 1 << 13
"""A larger tensor is represented by this many evenly spaced values: shares are correct to half a percent."""
_AT_ONCE = 1 << 22
"""The number of values sorted into bins together, and checked for NaN together: bounds the memory needed, to some tens
of megabytes."""
_PLAIN_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Sample(NamedTuple):
    """Some values of one tensor, and the non-finite counts of all of it. Both are on its device."""

    values: Tensor
    """fp32 or float64, one dimension; a copy."""
    broken: Tensor
    """NaN, +Inf and -Inf in the whole tensor."""


def take_sample(tensor: Tensor) -> Sample | None:
    """A sample of a tensor's current values; `None` if they cannot be read."""
    with WithoutHooks():
        plain = _plain(tensor)
        if plain is None:
            return None
        flat = _flat(plain)
        return Sample(_copied(thinned(flat, SAMPLE)), _broken(flat))


def largest_of(tensor: Tensor) -> Tensor | None:
    """The largest absolute value of a tensor, NaN if there is one; `None` if it is empty or cannot be read."""
    with WithoutHooks():
        plain = _plain(tensor)
        if plain is None or not plain.numel():
            return None
        low, high = torch.aminmax(plain if plain.dtype in _PLAIN_FLOATS else plain.float())
        return torch.maximum(low.abs(), high.abs())


def sample_again(tensor: Tensor) -> Tensor | None:
    """The current values of a sample of the tensor, without reading the rest."""
    with WithoutHooks():
        plain = _plain(tensor)
        return None if plain is None else _copied(thinned(_flat(plain), SAMPLE))


def _copied(values: Tensor) -> Tensor:
    copied = values.to(_wide_enough(values), copy=True)
    return copied if copied.is_contiguous() else copied.contiguous()


def thinned(flat: Tensor, most: int) -> Tensor:
    """At most `most` values of a flat tensor, evenly spaced.

    The distance has no common factor with the size: otherwise only a few columns of a matrix would be sampled.
    """
    size = flat.numel()
    if size <= most:
        return flat
    distance = -(-size // most)
    while math.gcd(distance, size) > 1:
        distance += 1
    return flat[::distance]


@dataclass(frozen=True)
class Bins:
    """Bins of one power of two each, from the smallest to the largest, on both sides of zero."""

    smallest_power: int
    largest_power: int

    @property
    def side(self) -> int:
        """The number of bins on one side of zero: the powers, and one for smaller values."""
        return self.largest_power - self.smallest_power + 1

    @property
    def count(self) -> int:
        """The number of all bins."""
        return 2 * self.side + 1

    def places(self, values: Tensor) -> Tensor:
        """The bin of each value of an fp32 or float64 tensor; `count` for non-finite values."""
        wide = values.dtype == torch.float64
        bits = values.view(torch.int64 if wide else torch.int32)
        mantissa, bias = (52, 1023) if wide else (23, 127)
        most = torch.iinfo(bits.dtype)
        size = bits & most.max
        nonzero = size != 0
        place = (size >> mantissa).sub_(bias)
        broken = place > bias
        place.clamp_(self.smallest_power - 1, self.largest_power - 1).sub_(self.smallest_power - 2)
        # Shifted by all bits but one, a number leaves its sign. `torch.where` would be many times slower on a CPU.
        place.mul_(nonzero).mul_((bits >> most.bits - 1).bitwise_or_(1)).add_(self.side)
        return place.masked_fill_(broken, self.count).to(torch.int64)


def count(samples: Sequence[Sample], bins: Bins, divide: Tensor | float | None = None) -> Tensor:
    """One row per sample, on the device of the first: values in each bin, then NaN, +Inf and -Inf.

    The values are divided by `divide` first, as gradients are by the loss scale.
    """
    with WithoutHooks():
        home = samples[0].values.device
        rows: dict[int, Tensor] = {}
        for members in _together([sample.values for sample in samples]):
            table = _count_together([samples[i].values for i in members], bins, divide)
            rows.update(zip(members, table.unbind(0), strict=True))
        counted = torch.stack([rows[i].to(home) for i in range(len(samples))])
        broken = torch.stack([sample.broken.to(home) for sample in samples])
        return torch.cat([counted, broken], dim=1)


def _together(values: Sequence[Tensor]) -> Iterable[list[int]]:
    """The groups of tensors that can be sorted in one pass: of one device and type, with a limited total size."""
    kinds: dict[Any, list[int]] = {}
    for i, each in enumerate(values):
        kinds.setdefault((each.device, each.dtype), []).append(i)
    for members in kinds.values():
        chosen: list[int] = []
        size = 0
        for i in members:
            if chosen and size + values[i].numel() > _AT_ONCE:
                yield chosen
                chosen, size = [], 0
            chosen.append(i)
            size += values[i].numel()
        yield chosen


def _count_together(values: list[Tensor], bins: Bins, divide: Tensor | float | None) -> Tensor:
    together = torch.cat(values)
    if divide is not None:
        together = together / (divide.to(together) if isinstance(divide, Tensor) else divide)
    places = bins.places(together)
    width = bins.count + 1  # the last column counts values that are in no bin
    sizes = [each.numel() for each in values]
    # The rows of the table are one vector: each tensor's bins are shifted to its own row.
    torch._foreach_add_(list(torch.split(places, sizes)), [row * width for row in range(len(values))])
    return _occurrences(places, len(values) * width).view(len(values), width)[:, : bins.count]


def _occurrences(places: Tensor, size: int) -> Tensor:
    """How often each number below `size` occurs. Except on a CPU, `bincount` would wait for the device."""
    if places.device.type == "cpu":
        return torch.bincount(places, minlength=size)
    table = torch.zeros(size, dtype=torch.int64, device=places.device)
    return table.scatter_add_(0, places, torch.ones_like(places))


def _broken(flat: Tensor) -> Tensor:
    """NaN, +Inf and -Inf in all of a flat tensor."""
    if not flat.is_floating_point() or not flat.numel() or _surely_finite(flat):
        return torch.zeros(3, dtype=torch.int64, device=flat.device)
    if runs_triton(flat.device) and flat.dtype in _PLAIN_FLOATS and (kernel := _triton_kernel()) is not None:
        return kernel(flat.contiguous())
    parts = []
    for part in torch.split(flat, _AT_ONCE):
        values = part if part.dtype in _PLAIN_FLOATS else part.float()
        parts.append(torch.stack([torch.isnan(values).sum(), (values == math.inf).sum(), (values == -math.inf).sum()]))
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


@cache
def _triton_kernel() -> Callable[[Tensor], Tensor] | None:
    try:
        from surefoot.observe.triton_nonfinite import count_broken
    except ImportError:  # a torch build without Triton: use plain operations
        return None
    return count_broken


def _surely_finite(flat: Tensor) -> bool:
    """Whether all values are known to be finite, from minimum and maximum on a CPU. On a device, reading would wait."""
    if flat.device.type != "cpu" or flat.dtype not in _PLAIN_FLOATS:
        return False
    low, high = torch.aminmax(flat)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _plain(tensor: Tensor) -> Tensor | None:
    """The strided, real memory of a tensor on this rank; `None` if there is none to read."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return None
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # a wrapper, which does not hold the values
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = tensor.values()
    elif tensor.layout is not torch.strided:
        return None
    tensor = tensor.as_subclass(Tensor)
    if tensor.is_complex():
        return tensor.abs()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _flat(tensor: Tensor) -> Tensor:
    """All values in memory order, without a copy if they are dense, transposed or not."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return tensor.permute(order).reshape(-1)


def _wide_enough(values: Tensor) -> torch.dtype:
    """fp32 represents halves, bytes and booleans exactly; integers need float64 where it is supported."""
    narrow = values.dtype == torch.float32 or values.dtype.itemsize < 4 or values.device.type == "mps"
    return torch.float32 if narrow else torch.float64
