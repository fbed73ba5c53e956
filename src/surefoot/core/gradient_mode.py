"""`without_gradients`: the decorator form of `torch.no_grad()`, without calling it.

Entering `torch.no_grad` calls functions that a script may have replaced, and that `surefoot run` observes. The guard
runs at every step of a user's script and must call neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_is_enabled, _set_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled


def without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function with gradients disabled."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _is_enabled()
        _set_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            _set_enabled(before)

    return run
