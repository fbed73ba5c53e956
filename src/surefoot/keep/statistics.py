"""Running statistics of batch norm that are not finite: noticed, and put back to the last ones that were.

A step on a batch that is not finite is refused, and its buffers are put back (`buffers.py`). But any forward in
training mode writes statistics: one over validation data, a second one for logging, one whose loss is never used. In
training mode nothing reads them, so the loss stays finite, and the model is broken wherever it is evaluated or saved.

So every `CHECK_STEPS` steps the statistics are copied and one number says whether all are finite. On a CPU it is read
at once, on a GPU at a later step, without waiting. While it says yes, the copy is the last sound one.

Left out: statistics that were broken before the first check (there is nothing to put back), and norms that are not
torch's batch norm.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from surefoot.core.device_copies import begin_reading_number
from surefoot.core.save_restore import is_batch_norm, is_writable, write_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from surefoot.core.device_copies import ArrivingNumber, KnownNumber

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
        """The last copy that was finite, with its step."""
        self._read: tuple[int, dict[str, Tensor], ArrivingNumber | KnownNumber] | None = None
        """A copy whose verdict is still out."""

    def check(self, step: int) -> str | None:
        """`step` steps are done. Puts back what is not finite, and returns a sentence about it; else `None`."""
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
        if not broken:  # a load or a return has mended them since
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
