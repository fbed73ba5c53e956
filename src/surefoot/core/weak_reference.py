"""References that do not keep the user's objects alive, and hooks that do nothing in copies of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

Given = ParamSpec("Given")
Value = TypeVar("Value")


def weak_reference(thing: Any) -> Callable[[], Any]:
    """Return a function that returns `thing` while it exists and `None` afterwards.

    An object whose class does not support weak references is kept alive.
    """
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


def weak_references(things: Iterable[Value]) -> Callable[[], list[Value]]:
    """Return a function that returns those of the things that still exist, in order."""
    references = [weak_reference(thing) for thing in things]
    return lambda: [thing for reference in references if (thing := reference()) is not None]


def weak_callback(method: Callable[Given, object]) -> Callable[Given, None]:
    """A function that calls `method` while its object exists, and does nothing afterwards."""
    reference = weakref.WeakMethod(method)

    def call(*args: Given.args, **kwargs: Given.kwargs) -> None:
        alive = reference()
        if alive is not None:
            alive(*args, **kwargs)

    return call


class InertWhenCopied:
    """Base of hooks that do nothing in a copied or unpickled object. A file with such a hook needs no surefoot."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # accepts anything and returns nothing, in every version of Python


class IdentityMap(Generic[Value]):
    """A value per object. Objects are distinguished by identity, need not be hashable, and are not kept alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def get(self, thing: Any) -> Value | None:
        """The value of an object; `None` if it has none."""
        entry = self._entries.get(id(thing))
        return entry[1] if entry is not None and entry[0]() is thing else None

    def set(self, thing: Any, value: Value) -> None:
        """Set the value of an object, as long as it exists."""
        entries, number = self._entries, id(thing)
        entries[number] = (weakref.ref(thing, lambda _: entries.pop(number, None)), value)

    def remove(self, thing: Any) -> None:
        """Remove an object's value, if it has one."""
        if self.get(thing) is not None:
            del self._entries[id(thing)]

    def values(self) -> list[Value]:
        """The values of all objects that still exist."""
        return [value for _, value in list(self._entries.values())]
