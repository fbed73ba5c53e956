"""Clips the gradients of a fused optimizer in a separate pass if that is cheaper than in the optimizer's kernel.

A fused kernel with `grad_scale` writes every gradient back, even if it has divided by 1: at 1.3B fp32 parameters this
costs 1.5 reads of all gradients at every step. A separate pass costs 2 (a read and a write), but only at steps that are
clipped; at others it reads one number and ends. So it is cheaper if fewer than about 70% of the steps are clipped. The
device decides whether a step is clipped; the host knows it a few steps later, and chooses accordingly.

The result is bitwise equal for fp32 gradients. For bf16 and fp16 it would not be: the kernel continues with the
quotient in fp32, while a separate pass has to round it. Those are always left to the kernel.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.act.apply import is_guarded_twice
from surefoot.core.block_tables import BlockTables, all_dense
from surefoot.core.device import runs_triton

if TYPE_CHECKING:
    from surefoot.types import StepRecord

WINDOW_STEPS = 16
"""The number of last known steps that the host considers."""
RARE = 0.5
"""Up to this share of clipped steps, a separate pass is used; it is cheaper below about 0.7."""
OFTEN = 0.75
"""From this share on, it is no longer used. Between the two, the choice does not change."""


class ClipRate:
    """Whether recent steps were rarely clipped, as far as the host knows."""

    def __init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=WINDOW_STEPS)
        self.rare = False
        """Whether few steps are clipped. Not before `WINDOW_STEPS` steps are known."""

    def take(self, record: StepRecord) -> None:
        """The result of a step is known. Skipped steps are ignored."""
        if record.skipped:
            return
        self._recent.append(float(record.signals.clip_factor) < 1)
        if len(self._recent) == WINDOW_STEPS:
            share = sum(self._recent) / WINDOW_STEPS
            self.rare = share < OFTEN if self.rare else share <= RARE


class ClipPass:
    """Divides gradients in place by the clipper's factor, on the device, and only at steps that are clipped."""

    def __init__(self) -> None:
        self.rate = ClipRate()
        self._tables: BlockTables | None = None

    def serves(self, optimizer: Any, gradients: list[Tensor], tables: BlockTables | None = None) -> bool:
        """Whether this is the cheaper method now, and gives the same bits as the optimizer's own kernel.

        `tables` are those of the gradients, if they exist: then all gradients are dense and have one dtype.
        """
        if not self.rate.rare or is_guarded_twice(optimizer) or gradients[0].dtype is not torch.float32:
            return False
        device = gradients[0].device
        if device.type != "cpu" and _load_divide(device) is None:
            return False
        return tables is not None or (
            all(gradient.dtype is torch.float32 for gradient in gradients) and all_dense(gradients)
        )

    def divide(self, gradients: list[Tensor], divisor: Tensor, skip: Tensor, tables: BlockTables | None = None) -> None:
        """Divide by a number on the device, unless `skip` is true there. Does not wait."""
        device = gradients[0].device
        if device.type == "cpu":
            if float(divisor) != 1 and not bool(skip):
                for gradient in gradients:
                    gradient.div_(divisor)
            return
        if tables is None:
            sizes = [gradient.numel() for gradient in gradients]
            if self._tables is None or self._tables.sizes != sizes or self._tables.device != device:
                self._tables = BlockTables(sizes, device)
            tables = self._tables
        tables.place(list(map(Tensor.data_ptr, gradients)))  # they may have been used for other tensors since
        _load_divide(device)(tables, divisor, skip.to(torch.bool).view(torch.uint8))


def _load_divide(device: torch.device) -> Any:
    """The function that launches the kernel; `None` if Triton is not available."""
    if not runs_triton(device):
        return None
    try:
        from surefoot.act.triton_divide import divide
    except ImportError:  # a torch build without Triton
        return None
    return divide
