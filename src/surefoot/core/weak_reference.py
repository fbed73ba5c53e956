"""References that do not keep the user's objects alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def weak_reference(thing: Any) -> Callable[[], Any]:
    """Return a function that gives `thing` while it is alive and `None` afterwards.

    An object whose class does not support weak references is kept alive.
    """
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing
