"""The preflight for a notebook: give what you have, read the table, keep the object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.doctor.examine import examine

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

    from surefoot.doctor.checks import Examination
    from surefoot.doctor.loss_of_batch import LossOf


def debug_training_stability(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    eval_loader: Iterable[Any] | None = None,
    loss_of: LossOf | None = None,
    clip: float | None = None,
    seconds: float = 60.0,
    show: bool = True,
) -> Examination:
    """Run the ten-step preflight, print its table and return it. Nothing is changed.

    Args:
        model: Copied, never run itself.
        loader: Gives batches: a loader, a list, or (with a note) an iterator.
        loss_fn: `loss_fn(prediction, target)`; may be left out when the model returns its own loss.
        optimizer: May be left out; what needs it is then skipped.
        eval_loader: With one, the splits are compared: rows in both, different scale.
        loss_of: `loss_of(model, batch)` gives the loss, for loops whose way to call the model cannot be guessed.
        clip: The limit on the gradient norm that the loop uses, if it clips.
        seconds: Time that all probes share, roughly.
        show: Print the table.
    """
    examination = examine(
        model,
        loader,
        loss_fn,
        optimizer,
        eval_loader=eval_loader,
        loss_of=loss_of,
        clip=clip,
        seconds=seconds,
    )
    if show:
        print(examination)
    return examination
