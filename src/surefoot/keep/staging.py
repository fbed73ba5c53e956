"""A copy of a state that training cannot change any more, so that it can be written while training goes on."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.keep.plain import DEEPEST
from surefoot.keep.tree import local_part, odd_kind, same_view


@dataclass(frozen=True)
class Staged:
    """A copy of a state."""

    tree: Any
    """The state, with tensors of its own. Their values may still be on their way until `wait()` returns."""

    def wait(self) -> None:
        """Return when every value has arrived. Called from the thread that writes."""


@torch.no_grad()
def stage(tree: Any) -> Staged:
    """Copy every tensor to host memory. Tensors that are one stay one; what is no container or tensor is shared."""
    return Staged(_Copier().copy(tree, 0))


class _Copier:
    """Copies a state, each tensor once."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def copy(self, value: Any, depth: int) -> Any:
        if depth > DEEPEST:  # flattening will say so, with the path
            return value
        kind = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return value.copy()
        if kind in (list, tuple, set, frozenset):
            return kind(self.copy(inner, depth + 1) for inner in value)
        if kind in (dict, defaultdict):
            return {key: self.copy(inner, depth + 1) for key, inner in value.items()}
        if kind is Counter:
            return Counter(value)
        if kind is OrderedDict:
            copied = OrderedDict((key, self.copy(inner, depth + 1)) for key, inner in value.items())
            copied.__dict__.update(vars(value))
            return copied
        return value

    def _tensor(self, value: Tensor) -> Tensor:
        tensor = local_part(value)
        if odd_kind(tensor):  # the same
            return tensor
        view = same_view(tensor)
        if view is None:
            return _cloned(tensor)
        if view not in self._copies:  # with the original, whose address must not be used again meanwhile
            self._copies[view] = (tensor, _cloned(tensor))
        return self._copies[view][1]


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().to("cpu", copy=True)
