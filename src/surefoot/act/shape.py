"""Rules that change gradients in place, entry by entry or unit by unit. They cost a pass over the gradients."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.core.settings import check_types
from surefoot.errors import UsageError, require

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from surefoot.types import NamedParameter, Shaper

log = logging.getLogger("surefoot")


def _gradients(parameters: Sequence[NamedParameter]) -> list[Tensor]:
    for _, parameter in parameters:
        _add_up(parameter)
    return [p.grad._values() if p.grad.is_sparse else p.grad for _, p in parameters if p.grad is not None]


def _add_up(parameter: Tensor) -> None:
    """Duplicate entries of a sparse gradient are summed."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.coalesce()


def _units(name: str, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient and the weights of the same units; for a sparse gradient, those with entries."""
    _add_up(parameter)
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is torch.strided:
        return gradient, parameter.detach()
    if gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1:  # rows, as of an embedding
        return gradient._values(), parameter.detach()[gradient._indices()[0]]
    raise UsageError(
        f"the gradient of {name or 'a parameter'} is of layout {gradient.layout} and stored by single entries, not by "
        "units; rules that work unit by unit take dense gradients, and the sparse ones of an embedding. Leave the "
        "parameter out, or make its gradient dense."
    )


def warn_of_unmatched(shapers: Sequence[Shaper], names: Collection[str]) -> None:
    """Log, once for each, the patterns of `exclude` that match none of these names."""
    for shaper in shapers:
        for pattern in getattr(shaper, "exclude", ()):
            if not any(fnmatchcase(name, pattern) for name in names):
                _warn_of(type(shaper).__name__, pattern, "" if any(names) else _NAMELESS)


_NAMELESS = " Parameters were given without names: give the model, or `model.named_parameters()`."


@cache
def _warn_of(kind: str, pattern: str, hint: str) -> None:
    log.warning("surefoot: %s(exclude=...): %r matches no parameter, so nothing is left out.%s", kind, pattern, hint)


@dataclass(frozen=True)
class ClipByValue:
    """Clamp every entry to [-limit, limit].

    This changes the direction of the gradient: large entries shrink, small ones do not. `ClipByNorm` keeps it.
    """

    limit: float
    """The largest absolute value of an entry."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.limit > 0, f"`limit` must be positive; got {self.limit}. To clip nothing, pass no clipper.")

    @torch.no_grad()
    def shape(self, parameters: Sequence[NamedParameter]) -> None:
        """Clamp in place. NaN stays NaN."""
        for gradient in _gradients(parameters):
            gradient.clamp_(-self.limit, self.limit)


@dataclass(frozen=True)
class AdaptiveUnitClip:
    """AGC (Brock et al., 2021, NFNets): clip each unit's gradient relative to the norm of its own weights.

    A unit computes one output: a row of a matrix, a filter of a convolution; a vector is one unit. For a sparse
    gradient (`nn.Embedding(sparse=True)`), only the rows with entries are read and clipped.
    """

    factor: float = 0.01
    """Largest ratio of gradient norm to weight norm."""
    eps: float = 1e-3
    """The minimum weight norm, so that units that start at zero can change."""
    vectors: bool = True
    """Whether biases and gains (rank 0 and 1) are clipped too."""
    exclude: tuple[str, ...] = ()
    """Names to leave out, as shell patterns: `("head.*",)`. The paper leaves the last linear layer out. A pattern that
    matches nothing is logged."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.factor > 0, f"`factor` must be positive; got {self.factor}.")
        require(self.eps > 0, f"`eps` must be positive, or weights at zero could never move; got {self.eps}.")

    @torch.no_grad()
    def shape(self, parameters: Sequence[NamedParameter]) -> None:
        """Scale units in place. A unit with a non-finite gradient is left unchanged."""
        for name, parameter in parameters:
            if parameter.grad is None or any(fnmatchcase(name, pattern) for pattern in self.exclude):
                continue
            if parameter.ndim <= 1 and not self.vectors:
                continue
            gradient, weights = _units(name, parameter)
            limit = self.factor * unit_norm(weights).clamp(min=self.eps)
            norm = unit_norm(gradient)
            scale = torch.clamp(limit / norm, max=1.0)  # a gradient of 0 gives Inf, and so 1
            gradient.mul_(torch.where(torch.isfinite(norm), scale, 1.0))


def unit_norm(tensor: Tensor) -> Tensor:
    """The norm of each unit, in fp32 at least, shaped to broadcast against the tensor."""
    dtype = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
    dims = None if tensor.ndim <= 1 else tuple(range(1, tensor.ndim))
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=True, dtype=dtype)
    small = torch.linalg.vector_norm(tensor * 2.0**-80, dim=dims, keepdim=True, dtype=dtype)
    return torch.where(torch.isinf(norm), small * 2.0**80, norm)  # where squares overflow and the norm does not


@dataclass(frozen=True)
class CentralizeGradients:
    """Gradient centralisation (Yong et al., 2020): subtract the mean from each unit's gradient.

    Only tensors of rank two and more have units to centre; biases and gains are unchanged.
    """

    @torch.no_grad()
    def shape(self, parameters: Sequence[NamedParameter]) -> None:
        """Centre in place."""
        for name, parameter in parameters:
            if parameter.grad is not None and parameter.ndim > 1:
                gradient, _ = _units(name, parameter)
                gradient.sub_(gradient.mean(dim=tuple(range(1, gradient.ndim)), keepdim=True))
