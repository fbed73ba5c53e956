"""Gradient accumulation that is equivalent to one large batch.

Without weights, every microbatch counts equally: the loss is divided by the window's length before backward, bit for
bit as in a hand-written loop. With weights (rows, tokens) the loss is multiplied by its weight instead, and the
gradient is divided by the sum of weights at the step: that is the mean over everything in the window, however uneven. A
window that ends early is corrected in the same way. A microbatch of weight 0 (only padding) is left out, whatever its
loss: the mean over nothing is NaN, and 0 x NaN is NaN too.

A microbatch is everything between two calls of `step`, with any number of losses: the gradients of several backward
calls add up, and so do their losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from surefoot.core.settings import shown
from surefoot.errors import UsageError

if TYPE_CHECKING:
    from surefoot.types import Scalar


def _or_one(weight: Scalar) -> Scalar:
    """The weight, or 1 if it is 0: padding alone is not a unit for others, and cannot be divided by."""
    return torch.where(weight != 0, weight, 1) if isinstance(weight, Tensor) else weight or 1.0


def read_if_free(weight: Scalar | None) -> Scalar | None:
    """A number instead of a tensor, unless reading it would wait for a device."""
    one = weight.numel() == 1 and not weight.is_complex() if isinstance(weight, Tensor) else isinstance(weight, Real)
    if weight is not None and not one:
        got = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else shown(weight)
        raise UsageError(f"`weight` must be one number, the rows or tokens the loss is a mean over; got {got}.")
    return weight.item() if isinstance(weight, Tensor) and weight.device.type == "cpu" else weight


def _times(loss: Tensor, relative: Scalar) -> Tensor:
    """The loss times its weight; 0, with a gradient of 0, if the weight is 0."""
    if isinstance(relative, Tensor):
        return torch.where(relative != 0, loss * relative, 0.0)
    return loss * relative if relative else torch.where(torch.zeros((), dtype=torch.bool, device=loss.device), loss, 0)


class WindowValues(TypedDict):
    """The stored state of a window in progress."""

    count: int
    open: bool
    weighted: bool
    unit: Scalar
    loss_sum: Tensor | None
    weight_sum: Scalar


@dataclass
class AccumulationWindow:
    """The microbatches since the last optimizer step."""

    length: int
    across_ranks: bool = False
    """Whether weights are summed over ranks, so that they must have one unit."""
    count: int = 0
    """The number of complete microbatches."""
    open: bool = False
    """Whether the next microbatch has begun."""
    weighted: bool = False
    unit: Scalar = 1.0
    """Weight of the first microbatch; the others are relative to it, which keeps the loss in fp16's range."""
    loss_sum: Tensor | None = None
    """Weighted sum of losses so far, on the device."""
    weight_sum: Scalar = 0.0

    def scaled(self, loss: Tensor, weight: Scalar | None) -> Tensor:
        """The loss to run backward on."""
        weight = read_if_free(weight)
        self._check(weight)
        if self.is_empty:
            self.weighted = weight is not None
            self.unit = 1.0 if weight is None or self.across_ranks else _or_one(weight)
        if not self.weighted:
            return loss if self.length == 1 else loss / self.length
        return _times(loss, self._relative(weight, loss))

    def add(self, loss: Tensor, weight: Scalar | None) -> None:
        """Add a loss whose backward is done."""
        relative = self._relative(weight, loss)
        seen = _times(loss.detach().reshape(()).to(torch.float32), relative)
        self.loss_sum = seen if self.loss_sum is None else self.loss_sum + seen
        if not self.open:
            self.weight_sum = self.weight_sum + relative
        self.open = True

    def close(self) -> None:
        """The microbatch is complete."""
        self.count += 1
        self.open = False

    def _relative(self, weight: Scalar | None, loss: Tensor) -> Scalar:
        weight = read_if_free(weight)
        if weight is None:
            return 1.0
        if isinstance(weight, Tensor) and loss.dtype is torch.float64:  # a quotient of counts would be float32
            weight = weight.to(torch.float64)
        return weight / self.unit

    def _check(self, weight: Scalar | None) -> None:
        if isinstance(weight, (int, float)) and not 0 <= weight < float("inf"):
            raise UsageError(
                f"`weight` must be a finite number of at least 0; got {weight}. It is the number of rows or tokens the "
                "loss is a mean over; a microbatch without any has weight 0."
            )
        if self.loss_sum is not None and self.weighted != (weight is not None):
            raise UsageError(
                "one microbatch of this window has a `weight` and another has none; pass it for all of them or for "
                "none."
            )

    @property
    def is_empty(self) -> bool:
        """Whether there is no loss yet, or only losses of weight 0. Does not read from a device."""
        return self.loss_sum is None or (
            self.weighted and not isinstance(self.weight_sum, Tensor) and not self.weight_sum
        )

    @property
    def full(self) -> bool:
        """Whether the window has all its microbatches."""
        return self.count >= self.length

    @property
    def mean_loss(self) -> Tensor | None:
        """Weighted mean over the microbatches, on the device; `None` before any loss."""
        return None if self.loss_sum is None else self.loss_sum / _or_one(self.weight_sum)

    @property
    def divisor(self) -> Scalar:
        """The divisor that the accumulated gradient still needs."""
        if self.weighted:
            return _or_one(self.weight_sum)
        return self.count / self.length if self.count else 1.0

    def state_dict(self) -> WindowValues:
        """The window as plain values and tensors; `length` and `across_ranks` are settings."""
        return {
            "count": self.count,
            "open": self.open,
            "weighted": self.weighted,
            "unit": self.unit,
            "loss_sum": self.loss_sum,
            "weight_sum": self.weight_sum,
        }

    def load_state_dict(self, state: WindowValues) -> None:
        """Continue a window in progress."""
        self.count, self.open, self.weighted = state["count"], state["open"], state["weighted"]
        self.unit, self.loss_sum, self.weight_sum = state["unit"], state["loss_sum"], state["weight_sum"]

    def cleared(self) -> AccumulationWindow:
        """An empty window of the same kind."""
        return AccumulationWindow(self.length, self.across_ranks)
