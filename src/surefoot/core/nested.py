"""Finds, changes and compares the tensors in nested values: batches, model outputs, states.

A container is a list, a tuple, a named tuple, a mapping (also a `UserDict` or a `ModelOutput`) or an instance of a
dataclass. With `objects=True` any other object that only holds data (a graph batch) is one too. Everything else is a
leaf. Walks are lazy, and a container that holds itself is entered once.

Not covered: sets, which have no order, and the contents of callables, modules and generators.
"""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import islice
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Kind: TypeAlias = Literal["sequence", "fields", "mapping", "object"]
"""How the parts of a container are reached: by index, as fields of a named tuple, by key, or as attributes."""

Types: TypeAlias = type | tuple[type, ...]

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))
"""Types that are always leaves: they are most of a state besides its tensors."""


def kind_of(value: Any, *, objects: bool = False) -> Kind | None:
    """The kind of container that a value is; `None` for a leaf."""
    if isinstance(value, (list, tuple)):
        return None if type(value) is torch.Size else "fields" if hasattr(value, "_fields") else "sequence"
    if isinstance(value, Mapping):
        return "mapping"
    if _is_dataclass_instance(value) or (objects and _holds_data(value)):
        return "object"
    return None


def _is_dataclass_instance(value: Any) -> bool:
    return hasattr(type(value), "__dataclass_fields__") and not isinstance(value, torch.nn.Module)


def _holds_data(value: Any) -> bool:
    """Whether an object only holds data: it is no function, class, module or random generator."""
    if isinstance(value, (type, torch.nn.Module, torch.Generator)) or callable(value):
        return False
    return bool(getattr(value, "__dict__", None))


def attributes_of(value: Any) -> dict[str, object]:
    """The data attributes of an object: the fields of a dataclass, also with `slots`, and its `__dict__`."""
    fields = getattr(type(value), "__dataclass_fields__", ())
    return {name: getattr(value, name) for name in fields if hasattr(value, name)} | getattr(value, "__dict__", {})


def parts_of(value: Any, *, objects: bool = False) -> Iterable[Any] | None:
    """The parts of a container, in order; `None` for a leaf."""
    exact = type(value)
    if exact is tuple or exact is list:  # the most common first: this runs at every step
        return value  # type: ignore[no-any-return]
    if exact is dict:
        return value.values()  # type: ignore[no-any-return]
    match kind_of(value, objects=objects):
        case "sequence" | "fields":
            return value  # type: ignore[no-any-return]
        case "mapping":
            return value.values()  # type: ignore[no-any-return]
        case "object":
            return attributes_of(value).values()
    return None


def named_parts(value: Any) -> list[tuple[str, Any]]:
    """The parts of a container with the expressions that lead to them: `[0]`, `['labels']`, `.mask`."""
    match kind_of(value):
        case "sequence" | "fields":
            return [(f"[{i}]", part) for i, part in enumerate(value)]
        case "mapping":
            return [(f"[{key!r}]", part) for key, part in value.items()]
        case "object":
            return [(f".{name}", part) for name, part in attributes_of(value).items()]
    return []


def rebuilt(value: Any, parts: Iterable[Any]) -> Any:
    """A container of the same kind with other parts, in the order of `parts_of`."""
    if isinstance(value, PackedSequence):
        data, batch_sizes, *indices = parts
        return PackedSequence(data, batch_sizes.cpu(), *indices)  # the sizes must stay on the CPU
    match kind_of(value):
        case "fields":
            return type(value)(*parts)
        case "sequence":
            return type(value)(parts)
        case "mapping":
            return with_entries(value, dict(zip(value, parts, strict=True)))
    return with_attributes(value, dict(zip(attributes_of(value), parts, strict=True)))


def with_entries(mapping: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A copy of a mapping with other values. It keeps its class and its other attributes."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return {**mapping, **entries}
    new = copy.copy(mapping)
    if isinstance(new, UserDict):  # a subclass may share the dictionary with its copy
        new.data = dict(new.data)
    for key, entry in entries.items():
        new[key] = entry
    return new


def with_attributes(value: Any, attributes: Mapping[str, object]) -> Any:
    """A copy of an object with other attributes, even if its class is frozen."""
    new = copy.copy(value)
    for name, attribute in attributes.items():
        object.__setattr__(new, name, attribute)
    return new


def leaves(
    value: Any,
    kind: Types = Tensor,
    *,
    objects: bool = False,
    deepest: int | None = None,
    longest: int | None = None,
    most: int | None = None,
) -> Iterator[Any]:
    """Every leaf of a kind, in order.

    At most `deepest` nested containers are entered, the first `longest` parts of each, and `most` parts in total.
    """
    open_parts: list[Iterator[Any]] = [iter((value,))]
    around: list[int] = []
    left = -1 if most is None else most + 1
    while open_parts:
        for part in open_parts[-1]:
            if left == 0:
                return
            left -= 1
            if isinstance(part, kind):
                yield part
            elif type(part) not in _PLAIN and (deepest is None or len(around) < deepest):
                inside = parts_of(part, objects=objects)
                if inside is not None and id(part) not in around:
                    open_parts.append(iter(inside) if longest is None else islice(inside, longest))
                    around.append(id(part))
                    break
        else:
            open_parts.pop()
            if around:
                around.pop()


def named_leaves(value: Any, name: str = "", around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every tensor, in order, with the expression that leads to it: `name` followed by `[0]['labels']`.

    `around` holds the ids of the containers that it is in: one that holds itself is entered once.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif type(value) not in _PLAIN and id(value) not in around:
        for key, part in named_parts(value):
            yield from named_leaves(part, f"{name}{key}", (*around, id(value)))


def nearest_leaves(variables: Mapping[str, Any], *, deepest: int, most: int) -> Iterator[tuple[str, Any]]:
    """Every tensor in some variables with the expression that leads to it, shorter expressions first."""
    waiting = deque((name, value, 0) for name, value in variables.items())
    for _ in range(most):
        if not waiting:
            return
        name, value, depth = waiting.popleft()
        if isinstance(value, Tensor):
            yield name, value
        elif depth < deepest and type(value) not in _PLAIN:
            waiting.extend((f"{name}{key}", part, depth + 1) for key, part in named_parts(value))


def map_leaves(value: Any, change: Callable[[Any], Any], kind: Types = Tensor) -> Any:
    """The same nesting in new containers, with each leaf of a kind replaced by the result of `change`."""
    return _mapped(value, change, kind, [])


def _mapped(value: Any, change: Callable[[Any], Any], kind: Types, around: list[int]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if type(value) in _PLAIN or id(value) in around:
        return value
    parts = parts_of(value)
    if parts is None:
        return value
    around.append(id(value))
    changed = [_mapped(part, change, kind, around) for part in parts]
    around.pop()
    return dict(zip(value, changed, strict=True)) if type(value) is dict else rebuilt(value, changed)


def equal(one: Any, other: Any) -> bool:
    """Whether two nested values are equal: tensors bitwise, containers part by part."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
