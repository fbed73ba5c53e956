"""A summary of a tensor: how many values are not finite, and the range of those that are.

Counting starts with a sum, which is finite only if every value is: one pass without a second tensor for healthy ones.
Only other tensors are counted value by value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Counts(NamedTuple):
    """How many values of a tensor are not finite, by kind."""

    nan: int = 0
    inf: int = 0
    negative_inf: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.nan + self.inf + self.negative_inf

    def __str__(self) -> str:
        named = ((self.nan, "NaN"), (self.inf, "Inf"), (self.negative_inf, "-Inf"))
        return " and ".join(f"{count:,} {name}" for count, name in named if count) or "none"


FINITE = Counts()


@dataclass(frozen=True)
class TensorDescription:
    """One input or output of an operation."""

    name: str
    """The argument (`arg 0`), or the program's name of the tensor."""

    dtype: str
    """Its type without `torch.`, such as `float16`."""

    shape: tuple[int, ...]

    low: float | None
    """The smallest finite value; `None` if there is none."""

    high: float | None
    """The largest finite value; `None` if there is none."""

    nan: int
    """How many values are NaN."""

    inf: int
    """How many are +Inf."""

    negative_inf: int
    """How many are -Inf."""

    zeros: int
    """How many are exactly 0."""

    subnormals: int
    """How many are so small that they have lost precision."""

    def __str__(self) -> str:
        text = f"{self.name} {self.dtype} {list(self.shape)}"
        if self.low is not None and self.high is not None:
            text += f" {self.low:.4g}" if self.low == self.high else f" {self.low:.4g} .. {self.high:.4g}"
        notes = [(self.nan, "NaN"), (self.inf, "Inf"), (self.negative_inf, "-Inf")]
        notes += [(self.zeros, "zero" if self.zeros == 1 else "zeros")]
        notes += [(self.subnormals, "subnormal" if self.subnormals == 1 else "subnormals")]
        counts = ", ".join(f"{count:,} {name}" for count, name in notes if count)
        return f"{text} ({counts})" if counts else text


def values_of(tensor: Tensor) -> Tensor | None:
    """The stored numbers of a tensor that can contain a non-finite one; `None` for integers and unreadable tensors."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return None
    tensor = tensor.detach()
    if tensor.is_nested and tensor.layout == torch.strided:
        tensor = tensor.values()
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout != torch.strided:
        values = getattr(tensor, "values", None)
        if values is None or tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
            return None
        tensor = values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def count(tensor: Tensor) -> Counts:
    """How many values are not finite."""
    try:
        values = values_of(tensor)
        if values is None or values.numel() == 0 or math.isfinite(float(values.sum())):
            return FINITE
        # The sum of finite values may overflow: check each value.
        return Counts(int(values.isnan().sum()), int(values.isposinf().sum()), int(values.isneginf().sum()))
    except (RuntimeError, NotImplementedError):  # a kind of tensor that cannot be read counts as finite
        return FINITE


def describe(name: str, tensor: Tensor) -> TensorDescription:
    """A description of a tensor, integers included."""
    counts, low, high, zeros, subnormals = FINITE, None, None, 0, 0
    values: Tensor | None = tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex():
        values = values_of(tensor)
        counts = count(tensor)
    if values is not None and values.numel() and values.dtype != torch.bool and not values.is_quantized:
        finite = values[values.isfinite()]
        if finite.numel():
            low, high = float(finite.min()), float(finite.max())
        zeros = int((values == 0).sum())
        if values.is_floating_point():
            tiny = torch.finfo(tensor.dtype).tiny
            subnormals = int(((values != 0) & (values.abs().double() < tiny)).sum())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorDescription(name, dtype, tuple(tensor.shape), low, high, *counts, zeros, subnormals)


def nonfinite_number(value: Any) -> bool:
    """Whether a plain number among the arguments is NaN or infinite."""
    if isinstance(value, complex):
        return not (math.isfinite(value.real) and math.isfinite(value.imag))
    return isinstance(value, float) and not math.isfinite(value)
