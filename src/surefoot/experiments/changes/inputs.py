"""The inputs of the model: noise instead of its inputs, or labels that belong to other rows.

Both change calls: those of a model with parameters, and those of torch's loss functions. Integer inputs (tokens) and
losses written by hand are not supported. The noise has its own random stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surefoot.experiments.changes.experiment import Experiment

_LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss",
           "l1_loss", "smooth_l1_loss", "huber_loss")  # fmt: skip


def synthesize_inputs(experiment: Experiment) -> None:
    """During training, replace the inputs of a model with numbers of mean 0 and deviation 1."""
    own = torch.Generator().manual_seed(0)
    depth = 0

    def noise(value: Any) -> Any:
        data = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
        if not data or value.grad_fn is not None or value.requires_grad:
            return value
        experiment.acted += 1
        return torch.randn(value.shape, generator=own).to(value.device, value.dtype)

    def changed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not torch.is_grad_enabled() or next(args[0].parameters(), None) is None:
            return None
        return (args[0], *map(noise, args[1:])), {key: noise(value) for key, value in kwargs.items()}

    def call(original: Any, args: Any, kwargs: Any) -> Any:
        nonlocal depth
        if depth == 0:
            args, kwargs = experiment.safely(changed, args, kwargs) or (args, kwargs)
        depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            depth -= 1

    experiment.patience = 5
    experiment.wrapping.around(nn.Module, "__call__", call)


def shuffle_labels(experiment: Experiment) -> None:
    """Shuffle the targets of each batch among its rows."""
    own = torch.Generator().manual_seed(0)

    def shuffled(target: Any) -> Any:
        if not isinstance(target, Tensor) or target.dim() == 0 or len(target) < 2 or target.requires_grad:
            return target
        experiment.acted += 1
        return target[torch.argsort(torch.rand(len(target), generator=own)).to(target.device)]

    def changed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = args[0] if args else kwargs.get("input")
        if not isinstance(given, Tensor) or not given.requires_grad:
            return None
        if len(args) > 1:
            return (args[0], shuffled(args[1]), *args[2:]), kwargs
        return args, {**kwargs, "target": shuffled(kwargs.get("target"))}

    experiment.patience = 5
    for name in _LOSSES:
        experiment.alter(functional, name, changed)
