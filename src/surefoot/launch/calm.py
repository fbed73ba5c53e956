"""When it is safe to compute something about the script's tensors, and how to do it unnoticed."""

from __future__ import annotations

from typing import Any

import torch

unseen = torch._C.DisableTorchFunction
"""A context in which neither a function mode nor a tensor subclass, ours or the script's, hears of what is called."""

_level = torch._C._functorch.maybe_current_level
_tracing = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack


def is_calm() -> bool:
    """Whether torch does what it says: it is not compiling, tracing or transforming, and no dispatch mode listens."""
    return _level() is None and not _dispatch_modes() and _tracing() is None and not torch.compiler.is_compiling()


def has_modes_of_its_own() -> bool:
    """Whether the script is inside a function mode, `with torch.device(...)` included: one entered now would be above.

    The device that `torch.set_default_device` sets for good does not count.
    """
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    stack: Any = torch.overrides
    return any(mode is not default for mode in stack._get_current_function_mode_stack())


class Listeners:
    """Whether the script listens where a private backward, or a look at saved tensors, would be heard."""

    gradients = False
    """Tensor hooks, module backward hooks, `retain_grad`: an extra backward would call or fill them."""
    saved = False
    """Saved-tensor hooks, as checkpointing uses: reading a saved tensor runs them."""


listeners = Listeners()


class Unnoticed:
    """Neither a mode nor a subclass nor, unless asked, autograd notices what is computed inside."""

    __slots__ = ("_before", "_grad", "_guard")

    def __init__(self, grad: bool = False) -> None:
        self._grad = grad
        self._guard: Any = None
        self._before = True

    def __enter__(self) -> None:
        self._guard = unseen()
        self._guard.__enter__()
        if not self._grad:
            self._before = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        if not self._grad:
            torch._C._set_grad_enabled(self._before)
        self._guard.__exit__(*error)
