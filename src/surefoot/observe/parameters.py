"""The parameters of models and optimizers: their names, which have a gradient, and the order in backward.

`Layout` maps an optimizer's parameters to the names of their models, `BackwardOrder` records which gradient is computed
first, and `parameter_report` describes every parameter of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.core.device_copies import upload
from surefoot.core.settings import require_module
from surefoot.core.weak_reference import weak_reference, weak_references
from surefoot.types import NamedParameter, format_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""Parts that DDP, torch.compile, FSDP and activation checkpointing add to names."""


def plain_name(name: str) -> str:
    """The name in the user's own code, without the parts that wrappers add.

    >>> plain_name("_orig_mod.module.layers.0.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(models: Sequence[nn.Module]) -> list[NamedParameter]:
    """Every parameter once, in order of registration; prefixed with the number of the model if there are several."""
    found: dict[int, NamedParameter] = {}
    for i, model in enumerate(models):
        require_module(model)
        prefix = f"{i}." if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            found.setdefault(id(parameter), NamedParameter(prefix + plain_name(name), parameter))
    return list(found.values())


def optimizer_parameters(param_groups: Iterable[dict[str, Any]], names: dict[int, str]) -> list[NamedParameter]:
    """The parameters of an optimizer, named as in the model, or by group and position if the model lacks them."""
    return [
        NamedParameter(names.get(id(parameter), f"optimizer.group{g}.{i}"), parameter)
        for g, group in enumerate(param_groups)
        for i, parameter in enumerate(group["params"])
    ]


def learning_rate(group: dict[str, Any]) -> Tensor | float | None:
    """The learning rate of a parameter group: a tensor if it is on a device, where reading it would wait.

    `None` if there is no number, as in Adafactor with `lr=None`, which computes its own.
    """
    rate = group.get("lr")
    if type(rate) is float:
        return rate
    if isinstance(rate, Tensor):
        if rate.numel() != 1:
            return None
        return rate.detach() if rate.device.type != "cpu" else float(rate)
    return float(rate) if isinstance(rate, Real) else None


class Layout:
    """The parameters of one optimizer, with the names in their models."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: Any,
        name_of: Callable[[Tensor], str | None] = lambda parameter: None,
    ) -> None:
        """Read the parameters of `optimizer`. Neither it nor the models are kept alive.

        `name_of` names parameters that belong to none of the models.
        """
        self._models = weak_references(models)
        self._optimizer = weak_reference(optimizer)
        self._name_of = name_of
        self._seen: list[int] = []
        self._present: tuple[int, ...] = ()
        self._every: tuple[int, ...] = ()
        self._positions: Tensor | None = None
        self.parameters: list[NamedParameter] = []
        self.names: tuple[str, ...] = ()
        self.ranks: tuple[int, ...] = ()
        """The number of dimensions of each parameter."""
        self._home = torch.device("cpu")
        self.refresh()

    def refresh(self) -> bool:
        """Read the parameters again if the optimizer has others now, as when layers are unfrozen one by one."""
        groups = self._optimizer().param_groups
        seen = list(chain.from_iterable(map(id, group["params"]) for group in groups))
        if seen == self._seen:
            return False
        models = self._models()
        names = {id(parameter): name for name, parameter in named_parameters(models)}
        own = {id(p): name for group in groups for p in group["params"] if (name := self._name_of(p)) is not None}
        self.parameters = optimizer_parameters(groups, own | names)
        self.names = tuple(name for name, _ in self.parameters)
        self.ranks = tuple(parameter.ndim for _, parameter in self.parameters)
        self._seen, self._present, self._every = seen, (), tuple(range(len(self.parameters)))
        self.known = sum(id(parameter) in names for _, parameter in self.parameters)
        return True

    @property
    def home(self) -> torch.device:
        """The device of the first parameter, even if all are removed later; small results are gathered there."""
        if self.parameters:
            self._home = self.parameters[0].parameter.device
        return self._home

    def with_gradient(self) -> tuple[list[NamedParameter], list[Tensor]]:
        """The parameters that currently have a gradient, and the gradients."""
        gradients = [gradient for _, parameter in self.parameters if (gradient := parameter.grad) is not None]
        if len(gradients) == len(self.parameters):
            present = self._every
        else:
            present = tuple([i for i, (_, parameter) in enumerate(self.parameters) if parameter.grad is not None])
        if present != self._present:
            self._present, self._positions = present, None
        if present is self._every:
            return self.parameters, gradients
        return [self.parameters[i] for i in present], gradients

    def drop_gradients(self) -> None:
        """Set every gradient to `None`: `optimizer.zero_grad()` without its overhead."""
        for _, parameter in self.parameters:
            parameter.grad = None

    @property
    def positions(self) -> Tensor | None:
        """The positions of the last call's gradients among all parameters; `None` if all had one."""
        if len(self._present) == len(self.parameters):
            return None
        if self._positions is None:
            self._positions = upload(self._present, self.home)
        return self._positions


class BackwardOrder:
    """Records the order in which gradients are computed, in one backward pass.

    The first gradient is the nearest to the loss, so among several broken gradients it is the one that broke first. The
    hooks are on for the first backward only.
    """

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        self.rank: dict[str, int] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note(name))  # type: ignore[no-untyped-call]
            for name, parameter in parameters
            if parameter.requires_grad and parameter.is_leaf
        ]

    def _note(self, name: str) -> Any:
        def hook(_: Tensor) -> None:
            self.rank.setdefault(name, len(self.rank))

        return hook

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def first(self, names: Iterable[str]) -> str:
        """The one of `names` that backward reached first."""
        return min(names, key=lambda name: self.rank.get(name, len(self.rank)))


@dataclass(frozen=True)
class ParameterReport:
    """Shape, mean, standard deviation, norm and gradient norm of every parameter.

    `shape` is a tuple, and `grad_norm` is `None` for a parameter that has no gradient.
    """

    rows: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        return format_table(self.rows)


@torch.no_grad()
def parameter_report(model: nn.Module) -> ParameterReport:
    """Describe the current state of every parameter of a model. Reads the device once."""
    parameters = named_parameters([model])
    if not parameters:
        return ParameterReport(())
    home = parameters[0].parameter.device
    table = torch.stack([_describe(parameter).to(home) for _, parameter in parameters]).tolist()
    return ParameterReport(
        tuple(
            {"name": name, "shape": tuple(parameter.shape), "mean": mean, "std": std, "norm": norm}
            | {"grad_norm": None if parameter.grad is None else grad_norm}
            for (name, parameter), (mean, std, norm, grad_norm) in zip(parameters, table, strict=True)
        )
    )


def _describe(parameter: Tensor) -> Tensor:
    data, grad = _parts(parameter.detach()), parameter.grad
    nan = data.new_full((), torch.nan)
    grad_norm = nan if grad is None else torch.linalg.vector_norm(_parts(grad.to_dense()))
    std = data.std(correction=0) if data.numel() else nan  # torch warns about the deviation of an empty tensor
    return torch.stack([data.mean(), std, torch.linalg.vector_norm(data), grad_norm])


def _parts(tensor: Tensor) -> Tensor:
    """All entries in float64; real and imaginary parts one by one."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()
