"""Graphs of earlier steps that the script still holds, such as losses summed without `item()`.

A token is attached to a node near the leaves of a graph: it exists while anything made from the node is referenced.
Counting the tokens costs nothing; their referrers are not searched.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from surefoot.record.facts import RetainedGraphs

if TYPE_CHECKING:
    from torch import Tensor


_LEAF = "AccumulateGrad"
"""The class of the nodes of leaves, which exist as long as their tensors."""


class RetainedGraphCounter:
    """Attaches tokens to graphs, and counts the ones that are still alive."""

    def __init__(self) -> None:
        self.retained: list[RetainedGraphs] = []
        """The step, the number of tokens alive, and the number of tokens so far."""
        self._tokens: list[weakref.ref[Any]] = []
        """Those that may still be alive, and the last ones."""
        self._added = 0

    def add_token(self, root: Tensor) -> None:
        """Attach a token to the graph below a loss."""
        node: Any = root.grad_fn
        for _ in range(2000):
            for below, _ in node.next_functions:
                if below is not None and type(below).__name__ != _LEAF:
                    node = below
                    break
            else:
                break
        token = _Token()
        node.metadata["surefoot"] = token
        self._tokens.append(weakref.ref(token))
        self._added += 1

    def count(self, step: int) -> None:
        """Count the graphs of much earlier steps that are still referenced."""
        alive = [ref for ref in self._tokens[:-8] if ref() is not None]
        self._tokens = alive + self._tokens[-8:]
        self.retained.append(RetainedGraphs(step, len(alive), self._added))
        if len(self.retained) > 200:
            self.retained = self.retained[::2]


class _Token:
    """An object that a weak reference can point to."""

    __slots__ = ("__weakref__",)
