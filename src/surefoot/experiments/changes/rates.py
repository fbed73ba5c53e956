"""The learning rate: divided, or warmed up.

The rate is changed for the length of each step only, and put back as it was: schedulers, and scripts that set
`group["lr"]` by hand, never see another value than their own. Updates without an optimizer are out of reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from torch.optim import Optimizer

    from surefoot.experiments.changes.experiment import Experiment


def divide_rate(experiment: Experiment, by: float) -> None:
    """Every step with a lower rate."""
    _scale_steps(experiment, lambda step: 1.0 / by)


def warm_up(experiment: Experiment) -> None:
    """A rate that grows linearly from nearly nothing over the first steps, on top of what the script does with it."""
    length = int(experiment.order.get("warmup_steps") or 100)
    _scale_steps(experiment, lambda step: min(1.0, (step + 1) / length))


def _scale_steps(experiment: Experiment, factor: Callable[[int], float]) -> None:
    stack: list[list[tuple[MutableMapping[str, Any], float | Tensor]]] = []
    """The rates to put back; an optimizer that steps another one makes two levels."""

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
