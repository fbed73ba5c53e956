"""The data: other batches, another seed, the same few rows repeated, noise as inputs, labels of other rows.

The order of the data is changed where torch draws it. Not covered: generators that the script creates with NumPy or
Python, and orders that were drawn before the optimizer was created. The comparison of the batches shows whether the
change had an effect.

Inputs and labels are changed in calls: those of a model with parameters, and those of torch's loss functions. Integer
inputs (tokens) and losses written by hand are not supported. The noise has its own random stream.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import SequentialSampler

if TYPE_CHECKING:
    from surefoot.experiments.changes.experiment import Experiment

OTHER = 7_919
"""Added to a seed, or used as the seed where there was none."""
FEW = 8
"""Rows of the tiny batch."""


def change_order(experiment: Experiment) -> None:
    """Keep the initial weights of the baseline, but use other batches.

    All shared random streams advance when the first optimizer is created: weights and data exist by then. Loaders that
    read the data in order are shuffled.
    """
    own = torch.Generator().manual_seed(OTHER)
    seed_torch = torch.manual_seed
    made = False

    def optimizer_made(result: Any, args: Any, kwargs: Any) -> None:
        nonlocal made
        if made:
            return
        made = True
        seed_torch(OTHER)
        random.seed(OTHER)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(OTHER)
        experiment.acted += 1

    def permuted(result: Any, args: Any, kwargs: Any) -> Any:
        """A permutation from one of the script's own generators, permuted once more."""
        if not made or kwargs.get("generator") is None or not isinstance(result, Tensor):
            return None
        return result[torch.argsort(torch.rand(len(result), generator=own)).to(result.device)]

    def in_order(result: Any, args: Any, kwargs: Any) -> Any:
        rows = list(result)
        return iter([rows[i] for i in torch.argsort(torch.rand(len(rows), generator=own)).tolist()])

    experiment.patience = 3
    experiment.replace(Optimizer, "__init__", optimizer_made)
    experiment.replace(torch, "randperm", permuted)
    experiment.replace(SequentialSampler, "__iter__", in_order)


def change_seed(experiment: Experiment) -> None:
    """Replace every integer seed with another one."""

    def other(value: Any) -> Any:
        return (value + OTHER) % 2**32 if isinstance(value, int) and not isinstance(value, bool) else value

    def seeding(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        experiment.acted += 1
        return tuple(other(a) for a in args), {key: other(value) for key, value in kwargs.items()}

    experiment.alter(torch, "manual_seed", seeding)
    experiment.alter(random, "seed", seeding)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        experiment.alter(numpy.random, "seed", seeding)
        experiment.alter(numpy.random, "default_rng", seeding)


def repeat_tiny_batch(experiment: Experiment) -> None:
    """Wherever rows are drawn in an order, draw the first few again and again, from the first step on."""
    kept: dict[int, Tensor] = {}
    made = False

    def optimizer_made(result: Any, args: Any, kwargs: Any) -> None:
        nonlocal made
        made = True

    def permuted(result: Any, args: Any, kwargs: Any) -> Any:
        if not made or not isinstance(result, Tensor) or len(result) <= FEW:
            return None
        experiment.acted += 1
        few = kept.setdefault(len(result), result[:FEW].clone())
        return few.repeat(-(-len(result) // FEW))[: len(result)]

    def in_order(result: Any, args: Any, kwargs: Any) -> Any:
        rows = list(result)
        if not torch.is_grad_enabled() or len(rows) <= FEW:
            return iter(rows)
        experiment.acted += 1
        return iter((rows[:FEW] * -(-len(rows) // FEW))[: len(rows)])

    experiment.patience = 20
    experiment.replace(Optimizer, "__init__", optimizer_made)
    experiment.replace(torch, "randperm", permuted)
    experiment.replace(SequentialSampler, "__iter__", in_order)


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
