"""Detects running statistics of batch norm that are not finite, and restores the last finite ones.

A step on a non-finite batch is refused, and its buffers are restored (`buffers.py`). But any forward in training mode
writes statistics: over validation data, for logging, or with a loss that is never used. Nothing reads them in training
mode, so the loss stays finite, but the model is broken wherever it is evaluated or saved.

So every `CHECK_STEPS` steps the statistics are copied, and one number shows whether all are finite. On a CPU it is read
immediately, on a GPU at a later step, without waiting. If they are finite, the copy becomes the last finite one.

Not covered: statistics that were broken before the first check (there is nothing to restore), and norms other than
torch's batch norm.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from surefoot.core.device_copies import ArrivingNumber, KnownNumber, begin_reading_number
from surefoot.core.save_restore import is_batch_norm, is_writable, write_all

if TYPE_CHECKING:
    from torch import Tensor, nn


CHECK_STEPS = 10
_NAMES = ("running_mean", "running_var")


class RunningStatistics:
    """The running statistics of the batch norms of some models. Keeps no module alive."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.norms = [
            (name, weakref.ref(module))
            for model in models
            for name, module in model.named_modules()
            if is_batch_norm(module) and module.running_mean is not None
        ]
        self._sound: tuple[int, dict[str, Tensor]] | None = None
        """The last finite copy, with its step."""
        self._read: tuple[int, dict[str, Tensor], ArrivingNumber | KnownNumber] | None = None
        """A copy that has not been judged yet."""

    def check(self, step: int) -> str | None:
        """`step` steps are done. Restores what is not finite and returns a sentence about it; otherwise `None`."""
        if self._read is None and step % CHECK_STEPS == 0:
            self._begin(step)
        if self._read is None or not self._read[2].has_arrived():
            return None
        (taken_at, copies, broken), self._read = self._read, None
        if not broken.wait():
            self._sound = taken_at, copies
            return None
        return self._put_back()

    @torch.no_grad()
    def _begin(self, step: int) -> None:
        copies = {name: tensor.detach().clone() for name, tensor in self._current().items()}
        if copies:
            largest = torch._foreach_norm(list(copies.values()), float("inf"))
            home = largest[0].device
            finite = torch.stack([each.to(home, torch.float32) for each in largest]).isfinite()
            self._read = step, copies, begin_reading_number((~finite).sum().float())

    def _current(self) -> dict[str, Tensor]:
        found = (
            (f"{name}.{each}", getattr(reference(), each, None)) for name, reference in self.norms for each in _NAMES
        )
        return {
            name: tensor
            for name, tensor in found
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and is_writable(tensor)
        }

    def _put_back(self) -> str | None:
        """Restore the last finite copy of those that are not finite."""
        broken = {name: tensor for name, tensor in self._current().items() if not bool(tensor.isfinite().all())}
        if not broken:  # a load or a return has repaired them since
            return None
        first = next(iter(broken))
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        said = f"{first}{more} is not finite: a forward pass in training mode got a non-finite value"
        if self._sound is None:
            return f"{said}; there is no earlier copy to restore"
        taken_at, copies = self._sound
        pairs = [
            (now, copies[name]) for name, now in broken.items() if name in copies and copies[name].shape == now.shape
        ]
        write_all([now for now, _ in pairs], [then for _, then in pairs])
        return (
            f"{said}; restored to step {taken_at}. Call model.eval() before a forward pass that is not a training step"
        )
