"""Detects the first call of a model in a step, without a hook on any model.

A hook that a model has between steps would be in its copies and files, and would prevent `torch.jit.script`. So torch's
global list of module hooks gets one entry instead, until the first call of a step; from there to the backward pass, the
models have hooks of their own. A step costs this one call. While no model is known, that is, up to the first updates,
every call of every module passes through here.

Calls of compiled models are not observed: compilation depends on the existing hooks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_forward_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class FirstModelCall:
    """Calls a function for every call of a module while it is open. It may return new positional arguments."""

    def __init__(self, called: Callable[[nn.Module, Any, Any], Any]) -> None:
        self._on_call = called
        self._handle: Any = None

    def open(self) -> None:
        """Start observing calls."""
        if self._handle is None:
            self._handle = register_module_forward_pre_hook(self._called)

    def close(self) -> None:
        """Stop observing calls."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _called(self, module: nn.Module, args: Any) -> Any:
        # A global module hook does not get the keyword arguments; the torch function that calls it has them.
        kwargs = sys._getframe(1).f_locals.get("kwargs")
        return self._on_call(module, args, {} if kwargs is None else kwargs)
