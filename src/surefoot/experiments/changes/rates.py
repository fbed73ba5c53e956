"""The learning rate: divided, or warmed up.

The rate is changed only during each step and restored afterwards, so schedulers, and scripts that set `group["lr"]`,
only see their own values. Updates without an optimizer are not supported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from torch.optim import Optimizer

    from surefoot.experiments.changes.experiment import Experiment


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
