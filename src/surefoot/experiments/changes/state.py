"""The optimizer's state: its moments reset, its eps changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from surefoot.watch.script_hooks import WithoutHooks

if TYPE_CHECKING:
    from surefoot.experiments.changes.experiment import Experiment

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
