"""Faults that a run can heal from, each injected into the same training at the same step.

A fault tampers with one thing a real loop can get wrong: the batch, the learning rate, the gradients, the optimizer's
moments, the weights in memory. `FAULTS` lists them by name. None lasts: whoever leaves out or undoes the damage ends
where the clean run ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Fault:
    """What is broken, and for how many steps."""

    batch: Callable[[Batch], Batch] | None = None
    lr: float = 1.0
    """What the learning rate is multiplied by, as a typing mistake would."""
    gradients: Callable[[nn.Module], None] | None = None
    optimizer: Callable[[torch.optim.Optimizer], None] | None = None
    weights: Callable[[nn.Module], None] | None = None
    steps: int = 1
    scaled: bool = False
    """Whether the loss is scaled, as for fp16: every loop then has its loss scaler."""


def _every_gradient(change: Callable[[Tensor], object]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                change(parameter.grad)

    return apply


def _one_gradient(model: nn.Module) -> None:
    gradient = next(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    gradient.view(-1)[0] = torch.nan


def _one_letter(batch: Batch) -> Batch:
    """A corrupt record: one character all over, and targets that have nothing to do with it."""
    x, y = batch
    return torch.zeros_like(x), y.flip(0)


def _wrong_targets(batch: Batch) -> Batch:
    """A shard whose targets belong to other rows."""
    x, y = batch
    return x, y.flip(1)


@torch.no_grad()
def _poison_moments(optimizer: torch.optim.Optimizer) -> None:
    """Second moments of next to nothing: the next update is thousands of times too large."""
    for state in optimizer.state.values():
        state["exp_avg_sq"].mul_(1e-8)


@torch.no_grad()
def _corrupt_weights(model: nn.Module) -> None:
    """A block of one matrix overwritten, as by a stray write or a failing memory."""
    weight = max(model.parameters(), key=Tensor.numel)
    weight[: len(weight) // 4] = 1e3


@torch.no_grad()
def _nan_weight(model: nn.Module) -> None:
    max(model.parameters(), key=Tensor.numel).view(-1)[7] = torch.nan


FAULTS: dict[str, Fault] = {
    "bad batch": Fault(batch=_one_letter),
    "burst of 8 bad batches": Fault(batch=_wrong_targets, steps=8),
    "learning rate x 100 for 20 steps": Fault(lr=100.0, steps=20),
    "one gradient x 10,000": Fault(gradients=_every_gradient(lambda grad: grad.mul_(1e4))),
    "one NaN in a gradient": Fault(gradients=_one_gradient),
    "fp16 overflow, 6 steps": Fault(
        gradients=_every_gradient(lambda grad: grad.fill_(torch.inf)), steps=6, scaled=True
    ),
    "poisoned moments": Fault(optimizer=_poison_moments),
    "corrupted weights": Fault(weights=_corrupt_weights),
    "one NaN weight": Fault(weights=_nan_weight),
}
