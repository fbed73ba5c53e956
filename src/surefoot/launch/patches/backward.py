"""Where gradients are asked for: `backward`, `autograd.grad`, and the hooks a script puts on either.

`Tensor.backward` calls `torch.autograd.backward`: the inner one of the two stays silent. `autograd.grad` counts as a
backward only in a loop without an optimizer, and only when the script itself calls it for a scalar. Where the script
listens to gradients or to saved tensors, that is remembered, so that no backward of ours is ever heard. Double
backwards (`create_graph`) are left out.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from surefoot.launch.calm import listeners
from surefoot.launch.sites import is_users

if TYPE_CHECKING:
    from surefoot.launch.patches.wrapping import Wrapping
    from surefoot.launch.watcher import Watcher


def wrap_backward(watcher: Watcher, wrapping: Wrapping) -> None:
    """Every call for gradients that the script makes."""
    inside = False

    def around(original: Any, args: Any, kwargs: Any) -> Any:
        nonlocal inside
        given = args[0] if args else kwargs.get("tensors")
        root = _first(given)
        if inside or not isinstance(root, Tensor) or not watcher.here():
            return original(*args, **kwargs)
        inside = True
        try:
            watcher.safely("backward", watcher.before_backward, root)
            result = original(*args, **kwargs)
        finally:
            inside = False
        watcher.safely("backward", watcher.after_backward)
        return result

    wrapping.around(torch.autograd, "backward", around)
    wrapping.around(Tensor, "backward", around)  # calls the one above, but, under a function mode, from inside the mode

    def around_grad(original: Any, args: Any, kwargs: Any) -> Any:
        """In a loop without an optimizer, asking for gradients is what a step begins with."""
        given = args[0] if args else kwargs.get("outputs")
        root = _first(given)
        loop = (
            not watcher.optimizers and isinstance(root, Tensor) and root.numel() == 1 and not kwargs.get("create_graph")
        )
        if not loop or not watcher.here():
            return original(*args, **kwargs)
        if not watcher.safely("backward", is_users, sys._getframe(2).f_code.co_filename):
            return original(*args, **kwargs)
        watcher.safely("backward", watcher.before_backward, root)
        result = original(*args, **kwargs)
        watcher.safely("backward", watcher.after_backward, result)
        return result

    wrapping.around(torch.autograd, "grad", around_grad)


def _first(given: Any) -> Any:
    """The tensor, or the first of several."""
    if isinstance(given, (list, tuple)):
        return given[0] if given else None
    return given if isinstance(given, Tensor) else None


def wrap_listeners(wrapping: Wrapping) -> None:
    """Where the script would hear of a backward of ours, none is made."""

    def around_hook(original: Any, args: Any, kwargs: Any) -> Any:
        listeners.gradients = True
        return original(*args, **kwargs)

    def around_saved(original: Any, args: Any, kwargs: Any) -> Any:
        listeners.saved = True
        return original(*args, **kwargs)

    wrapping.around(Tensor, "register_hook", around_hook)
    wrapping.around(Tensor, "retain_grad", around_hook)
    for name in ("register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"):
        wrapping.around(nn.Module, name, around_hook)
    wrapping.around(torch.autograd.graph.saved_tensors_hooks, "__enter__", around_saved)


def wrap_function_modes(watcher: Watcher, wrapping: Wrapping) -> None:
    """A mode of the script's may be left while the tape lies on top of it: the tape steps aside."""

    def around_exit(original: Any, args: Any, kwargs: Any) -> Any:
        tape = watcher.look.tape if watcher.look is not None else None
        if tape is None or args[0] is tape or not watcher.here() or not tape.is_on_top():
            return original(*args, **kwargs)
        tape.leave()
        try:
            return original(*args, **kwargs)
        finally:
            tape.__enter__()  # type: ignore[no-untyped-call]

    wrapping.around(TorchFunctionMode, "__exit__", around_exit)
