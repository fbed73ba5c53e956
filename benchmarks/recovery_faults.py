"""Faults that a run can heal from, each injected into the same training at the same step.

A fault tampers with one thing a real loop can get wrong: the batch, the learning rate, the gradients, the optimizer's
moments, the weights in memory. `FAULTS` lists them by name. None lasts: whoever leaves out or undoes the damage ends
where the clean run ends. When a step is repeated, a bad batch is as bad and a wrong rate as wrong as before; gradients,
moments and weights are damaged by accident, and that happens once. Weights are damaged in memory, without an operation
of torch: what a script writes to its own weights is intended and not undone.
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

    @property
    def is_accident(self) -> bool:
        """Whether it does not strike again when the step is repeated."""
        return self.batch is None and self.lr == 1.0

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


def _corrupt_record(batch: Batch) -> Batch:
    """A corrupt record: the same input all over, and targets that have nothing to do with it."""
    x, y = batch
    return torch.zeros_like(x), y.flip(0)


def _wrong_targets(batch: Batch) -> Batch:
    """A shard whose targets belong to others."""
    x, y = batch
    return x, y.flip(y.ndim - 1)


@torch.no_grad()
def _poison_moments(optimizer: torch.optim.Optimizer) -> None:
    """Second moments of next to nothing, or a momentum a thousand times too large: the next update is far too large."""
    for state in optimizer.state.values():
        if "exp_avg_sq" in state:
            state["exp_avg_sq"].mul_(1e-8)
        else:
            state["momentum_buffer"].mul_(1e3)


@torch.no_grad()
def _lose_moments(optimizer: torch.optim.Optimizer) -> None:
    """The moments of one parameter swapped for those of noise."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.ndim:
                value.copy_(value.flatten().flip(0).view_as(value))


def _memory(parameter: Tensor) -> Tensor:
    """The same memory, without the version counter of the parameter."""
    return torch.from_numpy(parameter.detach().numpy())


def _flip_bits(model: nn.Module) -> None:
    """Forty flipped bits in exponents, all over the largest matrix."""
    weight = _memory(max(model.parameters(), key=Tensor.numel)).view(-1)
    chosen = torch.randperm(len(weight), generator=torch.Generator().manual_seed(3))[:40]
    weight[chosen] = (weight[chosen].view(torch.int32) ^ (1 << 27)).view(torch.float32)


def _new_layer(model: nn.Module) -> None:
    """The last layer as it was before training: memory that holds what it held earlier."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    _memory(last.weight).copy_(0.02 * torch.randn(last.weight.shape, generator=torch.Generator().manual_seed(3)))


def _corrupt_weights(model: nn.Module) -> None:
    """A block of one matrix overwritten, as by a stray write or a failing memory."""
    weight = _memory(max(model.parameters(), key=Tensor.numel))
    weight[: max(len(weight) // 4, 1)] = 1e3


def _nan_weight(model: nn.Module) -> None:
    _memory(max(model.parameters(), key=Tensor.numel)).view(-1)[7] = torch.nan


FAULTS: dict[str, Fault] = {
    "bad batch": Fault(batch=_corrupt_record),
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
    "40 flipped bits": Fault(weights=_flip_bits),
    "a layer as before training": Fault(weights=_new_layer),
    "moments in the wrong order": Fault(optimizer=_lose_moments),
    "gradients with the wrong sign, 10 steps": Fault(gradients=_every_gradient(lambda grad: grad.neg_()), steps=10),
    "gradients x 30, 5 steps": Fault(gradients=_every_gradient(lambda grad: grad.mul_(30)), steps=5),
}
