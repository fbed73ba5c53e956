"""Putting a wrapper around a function of somebody else's, so that nobody can tell.

A wrapper calls the original with the same arguments and returns what it returned. While torch compiles or traces, it is
only a pass-through, so that graphs come out the same. Pickle and TorchScript, which know functions by name and by
identity, find what they expect.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.jit._builtins import _find_builtin, _register_builtin

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.launch.watcher import Watcher


def around(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Let `call(original, args, kwargs)` stand in for a function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return call(original, args, kwargs)

    if isinstance(original, types.BuiltinMethodType):  # pickled by reference: it must be found where it says
        wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
    setattr(owner, name, wrapper)
    builtin = _find_builtin(original)  # type: ignore[no-untyped-call]
    if builtin is not None:  # TorchScript knows its functions by identity
        _register_builtin(wrapper, builtin)


class Wrapping:
    """Wraps functions on behalf of one watcher."""

    def __init__(self, watcher: Watcher) -> None:
        self._safely, self._here = watcher.safely, watcher.here

    def around(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Let `call(original, args, kwargs)` stand in for a function."""
        around(owner, name, call)

    def after(self, owner: Any, name: str, probe: str, observe: Callable[..., None]) -> None:
        """Call the original, then let `observe(result, args, kwargs)` look."""
        safely, here = self._safely, self._here

        def call(original: Any, args: Any, kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if here():
                safely(probe, observe, result, args, kwargs)
            return result

        self.around(owner, name, call)
