"""The step: gradients clipped to norm 1 or not applied, another learning rate, moments reset, eps changed.

Changes of gradients act right before an optimizer steps, after a scaler has unscaled. (Fused optimizers unscale inside
the step: their scale is taken into account.) Optimizers that compute gradients in a closure are not supported there.

The rate is changed only during each step and restored afterwards, so schedulers, and scripts that set `group["lr"]`,
only see their own values. Updates without an optimizer are not supported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.core.without_hooks import WithoutHooks

if TYPE_CHECKING:
    from surefoot.experiments.changes.experiment import Experiment
    from surefoot.guard.step_decision import StepDecision

LIMIT = 1.0
"""The clipping norm that most recipes use."""


def clip(experiment: Experiment) -> None:
    """Limit the gradient norm of each optimizer to 1. Non-finite gradients stay as they are."""

    def before(optimizer: Optimizer, decision: StepDecision) -> None:
        held = [t.grad for group in optimizer.param_groups for t in group["params"] if t.grad is not None]
        grads = [g for g in held if g.layout is torch.strided]
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


def _is_broken(value: Any) -> bool:
    return isinstance(value, (float, Tensor)) and not math.isfinite(float(value))


def divide_rate(experiment: Experiment, by: float) -> None:
    """Take every step with a lower rate."""
    _scale_steps(experiment, lambda step: 1.0 / by)


def warm_up(experiment: Experiment) -> None:
    """Increase the rate linearly from almost 0 over the first steps, on top of the script's own schedule."""
    length = int(experiment.order.get("warmup_steps") or 100)
    _scale_steps(experiment, lambda step: min(1.0, (step + 1) / length))


def _scale_steps(experiment: Experiment, factor: Callable[[int], float]) -> None:
    stack: list[list[tuple[MutableMapping[str, Any], float | Tensor]]] = []
    """The rates to restore. An optimizer that steps another one needs two levels."""

    def before(optimizer: Optimizer) -> None:
        changed = {id(group) for level in stack for group, _ in level}
        step = max(0, experiment.number(optimizer))
        level: list[tuple[MutableMapping[str, Any], float | Tensor]] = []
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, (int, float, Tensor)) and id(group) not in changed:
                level.append((group, rate))
                group["lr"] = rate * factor(step)
        experiment.acted += bool(level)
        stack.append(level)

    def after(optimizer: Optimizer) -> None:
        for group, rate in stack.pop() if stack else ():
            group["lr"] = rate

    experiment.before_step(before)
    experiment.after_step(after)


USUAL_EPS = 1e-8
LARGE_EPS = 1e-4
"""Used if eps already has a usual value: large enough to shorten steps whose second moment is near 0."""


def reset_moments(experiment: Experiment) -> None:
    """Reset moments and step counts right before the baseline's failing step, and after a state is loaded."""
    at = experiment.order.get("reset_at")

    def before(optimizer: Optimizer) -> None:
        if at is not None and experiment.number(optimizer) == at:
            experiment.acted += _forget(optimizer)

    def loaded(result: Any, args: Any, kwargs: Any) -> None:
        experiment.acted += _forget(args[0])

    experiment.before_step(before)
    experiment.replace(Optimizer, "load_state_dict", loaded)


def _forget(optimizer: Optimizer) -> bool:
    """Set the optimizer's state of each parameter to zero, in place: some optimizers never create it again."""
    found = False
    with WithoutHooks():
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    value.zero_()
                    found = True
                elif key == "step":
                    state[key] = 0
    return found


def change_eps(experiment: Experiment) -> None:
    """Replace an unusual eps with 1e-8, and a usual one with 1e-4."""

    def before(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if isinstance(eps, float) and not group.get("_surefoot_eps"):
                group["eps"] = other_eps(eps)
                group["_surefoot_eps"] = True
                experiment.acted += 1
                experiment.notes.append(f"eps {eps:g} became {group['eps']:g}")

    experiment.patience = 3
    experiment.before_step(before)


def other_eps(eps: float) -> float:
    """The eps to try."""
    return LARGE_EPS if 1e-9 <= eps <= 1e-6 else USUAL_EPS
