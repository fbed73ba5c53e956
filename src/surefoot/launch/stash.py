"""Guarding a step: gradients that are not finite are hidden for its length, and given back after it.

A parameter without a gradient is left exactly as it is, by every optimizer of torch; its state does not age either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Stash:
    """The gradients that are hidden now, by the number of the optimizer."""

    def __init__(self) -> None:
        self.skipped = 0
        self._held: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def hide(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Hide the gradients for one step."""
        held = [(t, t.grad) for group in optimizer.param_groups for t in group["params"] if t.grad is not None]
        for tensor, _ in held:
            tensor.grad = None
        self._held[number] = held
        self.skipped += 1

    def give_back(self, number: int) -> None:
        """The step is over."""
        for tensor, grad in self._held.pop(number, ()):
            tensor.grad = grad
