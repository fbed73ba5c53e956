"""Gradient accumulation that equals the large batch.

Without weights every microbatch counts the same: the loss is divided by the window's length before backward, as people
write it by hand, bit for bit. With weights (rows, tokens) the loss is multiplied by its weight instead, and the sum of
weights is divided out of the gradient at the step; that is the mean over everything in the window, however uneven. A
window that ends early is corrected the same way. Without accumulation several losses before one step add up, as they
do in a bare loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from surefoot.types import Scalar


def _or_one(weight: Scalar) -> Scalar:
    """The weight, or 1 where it is 0: a microbatch of padding alone is no unit for the others."""
    return torch.where(weight > 0, weight, 1) if isinstance(weight, Tensor) else weight


@dataclass
class AccumulationWindow:
    """The microbatches since the last step."""

    length: int
    across_ranks: bool = False
    """Whether weights are added up over ranks, so that they must share one unit."""
    count: int = 0
    loss_sum: Tensor | None = None
    """Weighted sum of losses so far, on the device."""
    unit: Scalar = 1.0
    """Weight of the first microbatch; the others are relative to it, which keeps the loss in fp16's range."""
    weight_sum: Scalar = field(default=0.0)
    weighted: bool = False

    def add(self, loss: Tensor, weight: Scalar | None) -> Tensor:
        """Take one microbatch in; returns the loss to run backward on."""
        self._check(weight)
        if self.count == 0:
            self.weighted = weight is not None
            self.unit = 1.0 if weight is None or self.across_ranks else _or_one(weight)
        relative: Scalar = 1.0 if weight is None else weight / self.unit
        seen = loss.detach().reshape(()).to(torch.float32)
        self.loss_sum = seen * relative if self.loss_sum is None else self.loss_sum + seen * relative
        self.weight_sum = self.weight_sum + relative
        self.count += 1
        if self.weighted:
            first = self.count == 1 and not self.across_ranks and not isinstance(weight, Tensor)
            return loss if first else loss * relative
        return loss if self.length == 1 else loss / self.length

    def _check(self, weight: Scalar | None) -> None:
        if isinstance(weight, (int, float)) and not weight > 0:
            raise UsageError(
                f"`weight` must be positive; got {weight}. It is the number of rows or tokens the loss is a mean over; "
                "leave a microbatch without any out of the window."
            )
        if self.count and self.weighted != (weight is not None):
            raise UsageError(
                "one microbatch of this window has a `weight` and another has none; give it to all of them or to none."
            )

    @property
    def full(self) -> bool:
        """Whether the window has all its microbatches."""
        return self.count >= self.length

    @property
    def mean_loss(self) -> Tensor | None:
        """Weighted mean of the losses, on the device; their sum without accumulation; `None` before any."""
        if self.loss_sum is None or (self.length == 1 and not self.weighted):
            return self.loss_sum
        return self.loss_sum / self.weight_sum

    @property
    def divisor(self) -> Scalar:
        """What the accumulated gradient still has to be divided by."""
        if self.weighted:
            return self.weight_sum
        return self.count / self.length if self.count and self.length > 1 else 1.0

    def cleared(self) -> AccumulationWindow:
        """An empty window of the same kind."""
        return AccumulationWindow(self.length, self.across_ranks)
