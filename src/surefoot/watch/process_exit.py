"""Observes `os._exit`. It is the only function that `surefoot run` replaces.

It is implemented in C and ends the process immediately: without a replacement, a script that calls it has no diagnosis.
The replacement has the same type, name, signature, documentation and pickle as the original, is installed under both of
its names, and like the original does not become a method when it is a class attribute.

This module imports nothing that the interpreter has not already loaded (see `run_script`).
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

WHY = "the run is diagnosed before a script ends with this function"


def leave_by(leaving: Callable[[int], None]) -> None:
    """Call `leaving(status)` before the process ends through `os._exit`."""
    original = os._exit
    stand_in: Any = ExitHook(original, leaving)
    os._exit = stand_in
    sys.modules[original.__module__]._exit = stand_in  # type: ignore[attr-defined]


class ExitHook:
    """A replacement for `os._exit` that makes a call first."""

    def __init__(self, original: Any, leaving: Callable[[int], None]) -> None:
        self._original, self._leaving = original, leaving
        self.__module__, self.__doc__ = original.__module__, original.__doc__

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """End the process, unless the arguments are wrong."""
        status = args[0] if args else kwargs.get("status")
        if isinstance(status, int) and len(args) + len(kwargs) == 1:  # otherwise the original raises
            self._leaving(status)
        return self._original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __repr__(self) -> str:
        return repr(self._original)

    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self._original.__name__)
