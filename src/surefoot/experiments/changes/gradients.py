"""Gradients: clipped to norm 1, or not applied for a suspected batch.

Both act right before an optimizer steps, after a scaler has unscaled. (Fused optimizers unscale inside the step: their
scale is taken into account.) Optimizers that compute gradients in a closure are not supported.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.observe.without_hooks import WithoutHooks

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from surefoot.experiments.changes.experiment import Experiment
    from surefoot.guard.step_decision import StepDecision

LIMIT = 1.0
"""The clipping norm that most recipes use."""


def clip(experiment: Experiment) -> None:
    """Limit the gradient norm of each optimizer to 1. Non-finite gradients stay as they are."""

    def before(optimizer: Optimizer, decision: StepDecision) -> None:
        grads = [g for g in _gradients(optimizer) if g.layout is torch.strided]
        if not grads or experiment.has_closure:
            return
        with WithoutHooks():
            scale = getattr(optimizer, "grad_scale", None)
            limit = LIMIT * (float(scale) if isinstance(scale, Tensor) else 1.0)
            norm = float(torch.stack([g.double().norm().cpu() for g in grads]).norm())
            if math.isfinite(norm) and norm > limit:
                for grad in grads:
                    grad.mul_(limit / norm)
                experiment.acted += 1

    experiment.change_gradients(before)


def skip_batches(experiment: Experiment) -> None:
    """Skip the steps on batches that failed in the baseline, and steps whose loss or gradient is not finite."""
    named = set(experiment.order.get("skip_steps") or ())
    hidden: list[list[tuple[Tensor, Tensor]]] = []

    def before(optimizer: Optimizer, decision: StepDecision) -> None:
        level: list[tuple[Tensor, Tensor]] = []
        number = experiment.number(optimizer)
        losses = experiment.watcher.context.losses.values
        bad = number in named or any(map(_is_broken, losses)) or bool(decision.nonfinite)
        if bad and not experiment.has_closure:
            for group in optimizer.param_groups:
                level += [(tensor, tensor.grad) for tensor in group["params"] if tensor.grad is not None]
            for tensor, _ in level:
                tensor.grad = None
            experiment.acted += 1
            experiment.skipped.append(number)
        hidden.append(level)

    def after(optimizer: Optimizer) -> None:
        for tensor, grad in hidden.pop() if hidden else ():
            tensor.grad = grad

    experiment.change_gradients(before)
    experiment.after_step(after)


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [t.grad for group in optimizer.param_groups for t in group["params"] if t.grad is not None]


def _is_broken(value: Any) -> bool:
    return isinstance(value, (float, Tensor)) and not math.isfinite(float(value))
