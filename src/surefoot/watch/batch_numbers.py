"""Numbers about one batch, its inputs and its targets, computed on the device of the batch.

On a CPU they are available immediately. On a GPU they are collected in one vector that is copied asynchronously, and
become facts when it has arrived.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

import torch
from torch import Tensor

from surefoot.core.device import has_streams
from surefoot.core.device_copies import begin_reading, begin_reading_number
from surefoot.watch.tensor_summary import row_sums

if TYPE_CHECKING:
    from surefoot.core.device_copies import AsyncCopy

ENDS, SUMMED = 8, 1 << 12
"""A fingerprint consists of this many numbers at either end, and of the sum of the first ones."""
MOST_LABELS, MOST_SAMPLED = 64, 512
NAN = -1.5e308
"""Replaces NaN in fingerprints, because each NaN has a hash of its own."""


class BatchFields(TypedDict, total=False):
    """Fields of `StepBatch`."""

    input_print: int
    input_largest: float
    target_print: int
    labels: dict[str, int]
    target_mean: float
    target_std: float
    target_largest: float


class _Numbers(NamedTuple):
    """Some of the numbers, with their name."""

    name: str
    values: Tensor


class BatchNumbers:
    """The numbers of one batch, which may still be on a device."""

    def __init__(self, inputs: Tensor | None, target: Tensor | None, with_scales: bool, most_rows: int) -> None:
        """Compute the numbers of a batch.

        Args:
            inputs: The input of the first layer, if it is known.
            target: The target of the loss, if it is known.
            with_scales: Whether to include the labels, and the scale of inputs and targets.
            most_rows: The maximum number of rows that get a fingerprint.
        """
        self._shapes = {"input": _shape(inputs), "target": _shape(target)}
        self._are_classes = target is not None and not target.is_floating_point()
        parts = [] if inputs is None else [_Numbers("input", _ends(inputs))]
        is_late = any(tensor is not None and has_streams(tensor.device) for tensor in (inputs, target))
        if inputs is not None and inputs.is_floating_point() and (with_scales or is_late):
            parts.append(_Numbers("input_largest", torch.linalg.vector_norm(inputs.detach(), math.inf)))
        if inputs is not None and inputs.dim() > 1 and most_rows:
            parts.append(_Numbers("rows", row_sums(inputs, most_rows)))
        if target is not None:
            parts.append(_Numbers("target", _ends(target)))
            parts += _target_parts(target) if with_scales or is_late else []
        self._names = [part.name for part in parts]
        self._lengths = [part.values.numel() for part in parts]
        flat = [part.values.reshape(-1).double() for part in parts]
        device = flat[0].device
        self._copy: AsyncCopy | None = None
        if has_streams(device):
            self._copy = begin_reading(torch.cat([values.to(device, non_blocking=True) for values in flat]))
        else:
            self._values = dict(zip(self._names, (values.tolist() for values in flat), strict=True))

    def has_arrived(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return self._copy is None or self._copy.has_arrived()

    def _read(self) -> dict[str, list[float]]:
        if self._copy is not None:
            pieces = torch.split(self._copy.wait(), self._lengths)
            self._values = {name: piece.tolist() for name, piece in zip(self._names, pieces, strict=True)}
            self._copy = None
        return self._values

    def rows(self) -> list[int]:
        """One number per row of the inputs; equal rows have equal numbers."""
        sums = self._read().get("rows", [])
        return [hash(pair) for pair in zip(sums[::2], sums[1::2], strict=True)]

    def are_finite(self) -> bool:
        """Whether inputs and targets are finite, as far as the numbers show."""
        named = self._read().items()
        return all(math.isfinite(value) for name, values in named if name != "rows" for value in values)

    def as_fields(self) -> BatchFields:
        """The numbers as fields of the facts."""
        values = self._read()
        fields: BatchFields = {}
        if "input" in values:
            fields["input_print"] = _print(self._shapes["input"], values["input"])
        if "input_largest" in values:
            fields["input_largest"] = values["input_largest"][0]
        if "target" in values:
            fields["target_print"] = _print(self._shapes["target"], values["target"])
        if "sample" in values:
            labels = Counter(values["sample"])
            if len(labels) <= MOST_LABELS and (self._are_classes or set(labels) <= {0.0, 1.0}):
                fields["labels"] = {str(int(label)): count for label, count in labels.items()}
            elif "target_scale" in values:
                mean, std, largest = values["target_scale"]
                fields |= {"target_mean": mean, "target_std": std, "target_largest": largest}
        return fields


class LargestNumbers:
    """Only the largest input and target of one batch, for types that can be non-finite."""

    def __init__(self, inputs: Tensor | None, target: Tensor | None) -> None:
        self._numbers = [
            None
            if tensor is None or not tensor.is_floating_point()
            else begin_reading_number(torch.linalg.vector_norm(tensor.detach(), math.inf))
            for tensor in (inputs, target)
        ]

    def has_arrived(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return all(number is None or number.has_arrived() for number in self._numbers)

    def rows(self) -> list[int]:
        """No row fingerprints are taken."""
        return []

    def are_finite(self) -> bool:
        """Whether inputs and targets are finite."""
        return all(number is None or math.isfinite(number.wait()) for number in self._numbers)

    def as_fields(self) -> BatchFields:
        """The numbers as fields of the facts."""
        names = ("input_largest", "target_largest")
        known = zip(names, self._numbers, strict=True)
        return cast("BatchFields", {name: number.wait() for name, number in known if number is not None})


def _shape(tensor: Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.shape)


def _print(shape: tuple[int, ...], values: list[float]) -> int:
    return hash((shape, tuple(NAN if value != value else value for value in values)))


def _ends(tensor: Tensor) -> Tensor:
    """The first and the last values, and a sum: equal tensors have equal ones, others almost surely do not."""
    flat = tensor.detach().reshape(-1)
    return torch.cat([flat[:ENDS].double(), flat[-ENDS:].double(), flat[:SUMMED].double().sum().reshape(1)])


def _target_parts(target: Tensor) -> list[_Numbers]:
    """The labels of a batch, and the scale of its targets if they are not classes."""
    flat: Any = target.detach().reshape(-1)
    parts = [_Numbers("sample", flat[:: -(-flat.numel() // MOST_SAMPLED)] if flat.numel() > MOST_SAMPLED else flat)]
    if target.is_floating_point():
        full = target.detach().float()
        scale = torch.stack([full.mean(), full.std(correction=0), torch.linalg.vector_norm(full, math.inf)])
        parts.append(_Numbers("target_scale", scale))
    return parts
