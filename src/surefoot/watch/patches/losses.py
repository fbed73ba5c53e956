"""Observes torch's loss functions while gradients are disabled, as in the validation loop of a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher

PROBE = "evaluation losses"
FUNCTIONS = (
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
)
_WHY = "the loss of a validation set, when gradients are off"
_gradients_on = torch.is_grad_enabled


def wrap_losses(watcher: Watcher, wrapping: Hooks) -> None:
    """Observe each call of a loss function without gradients."""
    here, safely, losses = watcher.probes.here, watcher.probes.safely, watcher.evaluation_losses

    def observe(name: str) -> None:
        def before(args: Any, kwargs: Any) -> Any:
            if _gradients_on():
                losses.note_training()
                return None
            return (args[0], any(isinstance(each, str) and each == "sum" for each in args))

        def after(token: Any, result: Any) -> None:
            if here():
                safely(PROBE, losses.take, name, token[0], result, token[1])

        wrapping.add(functional, name, PROBE, _WHY, before, after)

    for name in FUNCTIONS:
        observe(name)
