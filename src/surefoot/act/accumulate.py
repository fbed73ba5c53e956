"""Gradient accumulation that equals the large batch.

Without weights every microbatch counts the same: the loss is divided by the window's length before backward, as people
write it by hand, bit for bit. With weights (rows, tokens) the loss is multiplied by its weight instead, and the sum of
weights is divided out of the gradient at the step; that is the mean over everything in the window, however uneven. A
window that ends early is corrected the same way.

A microbatch is what lies between two calls of `step`, however many losses it has: two losses that are run backward one
after the other add up, as their gradients do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from surefoot.types import Scalar


def _or_one(weight: Scalar) -> Scalar:
    """The weight, or 1 where it is 0: a microbatch of padding alone is no unit for the others."""
    return torch.where(weight > 0, weight, 1) if isinstance(weight, Tensor) else weight


class WindowValues(TypedDict):
    """What is stored of a window that is under way."""

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
    """Whether weights are added up over ranks, so that they must share one unit."""
    count: int = 0
    """Microbatches that are complete."""
    open: bool = False
    """Whether the next microbatch has been begun."""
    weighted: bool = False
    unit: Scalar = 1.0
    """Weight of the first microbatch; the others are relative to it, which keeps the loss in fp16's range."""
    loss_sum: Tensor | None = None
    """Weighted sum of losses so far, on the device."""
    weight_sum: Scalar = 0.0

    def scaled(self, loss: Tensor, weight: Scalar | None) -> Tensor:
        """The loss to run backward on."""
        self._check(weight)
        if self.loss_sum is None:
            self.weighted = weight is not None
            self.unit = 1.0 if weight is None or self.across_ranks else _or_one(weight)
        if not self.weighted:
            return loss if self.length == 1 else loss / self.length
        return loss * self._relative(weight)

    def add(self, loss: Tensor, weight: Scalar | None) -> None:
        """Take in a loss whose backward is done."""
        relative = self._relative(weight)
        seen = loss.detach().reshape(()).to(torch.float32) * relative
        self.loss_sum = seen if self.loss_sum is None else self.loss_sum + seen
        if not self.open:
            self.weight_sum = self.weight_sum + relative
        self.open = True

    def close(self) -> None:
        """The microbatch is complete."""
        self.count += 1
        self.open = False

    def _relative(self, weight: Scalar | None) -> Scalar:
        return 1.0 if weight is None else weight / self.unit

    def _check(self, weight: Scalar | None) -> None:
        if isinstance(weight, (int, float)) and not 0 < weight < float("inf"):
            raise UsageError(
                f"`weight` must be positive; got {weight}. It is the number of rows or tokens the loss is a mean over; "
                "leave a microbatch without any out of the window."
            )
        if self.loss_sum is not None and self.weighted != (weight is not None):
            raise UsageError(
                "one microbatch of this window has a `weight` and another has none; give it to all of them or to none."
            )

    @property
    def full(self) -> bool:
        """Whether the window has all its microbatches."""
        return self.count >= self.length

    @property
    def mean_loss(self) -> Tensor | None:
        """Weighted mean over the microbatches, on the device; `None` before any loss."""
        return None if self.loss_sum is None else self.loss_sum / self.weight_sum

    @property
    def divisor(self) -> Scalar:
        """What the accumulated gradient still has to be divided by."""
        if self.weighted:
            return self.weight_sum
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
        """Continue a window that was under way."""
        self.count, self.open, self.weighted = state["count"], state["open"], state["weighted"]
        self.unit, self.loss_sum, self.weight_sum = state["unit"], state["loss_sum"], state["weight_sum"]

    def cleared(self) -> AccumulationWindow:
        """An empty window of the same kind."""
        return AccumulationWindow(self.length, self.across_ranks)
