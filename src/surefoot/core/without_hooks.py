"""Detects when it is safe to compute with the user's tensors, and computes without calling their hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

without_torch_function = torch._C.DisableTorchFunction
"""A context in which no function mode and no tensor subclass is called."""
P = ParamSpec("P")
R = TypeVar("R")

_level = torch._C._functorch.maybe_current_level
_tracing = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled


def runs_eagerly() -> bool:
    """Whether torch runs eagerly: it is not compiling, tracing or transforming, and no dispatch mode is active."""
    return _level() is None and not _dispatch_modes() and _tracing() is None and not _is_compiling()


_intercepts: dict[type, bool] = {Tensor: False}


def intercepts_operations(tensor: Tensor) -> bool:
    """Whether a tensor's class, outside torch, intercepts every operation: then no operation is used."""
    kind = type(tensor)
    known = _intercepts.get(kind)
    if known is None:
        of_torch = kind.__module__.split(".")[0] == "torch"
        known = kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl and not of_torch
        _intercepts[kind] = known
    return known


class WithoutHooks:
    """Computations inside call neither a mode nor a subclass, and autograd records them only on request."""

    __slots__ = ("_before", "_grad", "_guard")

    def __init__(self, grad: bool = False) -> None:
        self._grad = grad
        self._guard: Any = None
        self._before = True

    def __enter__(self) -> None:
        self._guard = without_torch_function()
        self._guard.__enter__()
        if not self._grad:
            self._before = _is_grad_enabled()
            _set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        if not self._grad:
            _set_grad_enabled(self._before)
        self._guard.__exit__(*error)


def without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function with gradients disabled, as decorated by `torch.no_grad()`, without calling that.

    Entering `torch.no_grad` calls functions that a script may have replaced, and that `surefoot run` observes.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _is_grad_enabled()
        _set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            _set_grad_enabled(before)

    return run
