"""Methods that are replaced on single objects of a framework while it trains, never in its classes.

The objects are not kept alive, copies of them have the methods of their classes, and `undo` restores the methods, also
if other code has replaced them since.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from surefoot.core.weak_reference import weak_reference

if TYPE_CHECKING:
    from collections.abc import Callable


class _Followed:
    """A wrapped method of one object. Does not keep the object alive.

    A copied or unpickled object has the method of its class: the loading process may not have surefoot.
    """

    before: Any = None
    is_over = False

    def __init__(self, thing: Any, name: str, function: Callable[..., Any]) -> None:
        self._thing, self._name, self._function = weak_reference(thing), name, function

    @property
    def own(self) -> Callable[..., Any]:
        """The method that would be called without surefoot."""
        if self.before is not None:
            return self.before  # type: ignore[no-any-return]
        thing = self._thing()
        return getattr(type(thing), self._name).__get__(thing)  # type: ignore[no-any-return]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.own(*args, **kwargs) if self.is_over else self._function(self.own, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.before is not None:
            return partial, (self.before,)
        thing = self._thing()
        return getattr, (nullcontext(), "__exit__") if thing is None else (thing, self._name)


class Replacements:
    """Methods that are replaced on single objects, which are not kept alive, and restored."""

    def __init__(self) -> None:
        self._done: list[tuple[Callable[[], Any], str, Callable[[], Any]]] = []

    def put(self, thing: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a method of one object."""
        function.before, function.is_over = vars(thing).get(name), False  # type: ignore[attr-defined]
        self._done.append((weak_reference(thing), name, weak_reference(function)))
        setattr(thing, name, function)

    def follow(self, thing: Any, name: str, function: Callable[..., Any]) -> None:
        """Call `function(own, *args, **kwargs)` instead of a method of one object; `own` is the method itself.

        The function must not reference the object, which would then be kept alive by itself.
        """
        self.put(thing, name, _Followed(thing, name, function))

    def undo(self) -> None:
        """Restore the methods, unless other code has replaced them since."""
        while self._done:
            thing_now, name, function_now = self._done.pop()
            thing, function = thing_now(), function_now()
            if thing is None or function is None:
                continue
            function.is_over = True  # below one that is still active, it ends together with that one
            first = now = vars(thing).get(name)
            while getattr(now, "is_over", False):
                now = now.before
            if now is first:
                continue
            if now is None:
                delattr(thing, name)
            else:
                setattr(thing, name, now)
