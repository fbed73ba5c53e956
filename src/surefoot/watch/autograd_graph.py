"""Reads an autograd graph, from the tensor that `backward` is called on down to the leaves, without changing it.

A reference to a node keeps the whole graph below it alive, with all saved tensors. So no node is referenced between the
forward and the backward pass: a node that must be found again gets a number (`mark`), which has the lifetime of the
node.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from surefoot.core.without_hooks import intercepts_operations
from surefoot.observe.readable import is_readable
from surefoot.watch.script_hooks import script_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_NODES = 20_000
_NUMBER = "surefoot number"


def nodes(root: Any) -> Iterator[Any]:
    """Every node under `root`, each once, nearest to the root first."""
    if root is None:
        return
    waiting, seen = [root], {root}
    position = 0
    while position < len(waiting) and position < MOST_NODES:
        node = waiting[position]
        position += 1
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)


def mark(node: Any, owner: object, number: int) -> None:
    """Give a node a number, by which it can be found later."""
    node.metadata[_NUMBER] = (owner, number)


def number_of(node: Any, owner: object) -> int | None:
    """The number that the same owner gave to a node."""
    held = node.metadata.get(_NUMBER)
    return held[1] if held is not None and held[0] is owner else None


def node_of(tensor: Tensor) -> Any:
    """The node that made a tensor; `None` if it has none, or if autograd refuses access to it.

    Autograd refuses for a view that was made without gradients and whose base has been changed in place since.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: Tensor) -> bool:
    """Whether no operation known to autograd made a tensor; false if autograd refuses access."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def leaf(node: Any) -> Tensor | None:
    """The leaf tensor a node accumulates into, if it is such a node."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, Tensor) and not intercepts_operations(variable) else None


def leaves(root: Any) -> list[Tensor]:
    """Every leaf tensor under `root` that will get a gradient."""
    return [variable for node in nodes(root) if (variable := leaf(node)) is not None]


def op(node: Any) -> str:
    """The usual name of a node's operation: `log` for `LogBackward0`."""
    return _short_name(str(node.name()) if hasattr(node, "name") else type(node).__name__)


@cache
def _short_name(name: str) -> str:
    name = name.rsplit("::", 1)[-1]
    for ending in ("Backward0", "Backward1", "Backward2", "Backward3", "Backward"):
        if name.endswith(ending):
            name = name.removesuffix(ending)
            break
    return name


def saved(node: Any) -> dict[str, Tensor]:
    """The tensors that a node saved for its backward, by name, except for those that can no longer be read."""
    found: dict[str, Tensor] = {}
    if script_hooks.saved:
        return found  # reading one would run the script's own hooks, a recomputation for instance
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError:  # freed by an earlier backward
                continue
            if isinstance(value, Tensor) and is_readable(value):
                found[name.removeprefix("_saved_")] = value
    return found


def leaves_first(root: Any) -> list[Any]:
    """The nodes, ordered so that each comes after everything that it was computed from."""
    order: list[Any] = []
    state: dict[Any, int] = {}
    stack: list[tuple[Any, Iterator[Any]]] = []
    if root is None:
        return order
    stack.append((root, iter([below for below, _ in root.next_functions if below is not None])))
    state[root] = 1
    while stack and len(state) < MOST_NODES:
        node, below = stack[-1]
        advanced = False
        for child in below:
            if child not in state:
                state[child] = 1
                stack.append((child, iter([b for b, _ in child.next_functions if b is not None])))
                advanced = True
                break
        if not advanced:
            stack.pop()
            order.append(node)
    return order
