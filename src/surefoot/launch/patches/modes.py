"""Blocks without gradients, which are how scripts evaluate, and compilation.

A block counts when the script's own code opens it, or a function of the script's that is decorated with it. A compiled
function guards on the modes and hooks that are on, so from the first compilation on neither is used again.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surefoot.launch.sites import is_users

if TYPE_CHECKING:
    from surefoot.launch.patches.wrapping import Wrapping
    from surefoot.launch.watcher import Watcher


def wrap_modes(watcher: Watcher, wrapping: Wrapping) -> None:
    """The blocks in which the script turns gradients off."""
    decorator = os.path.join("torch", "utils", "_contextlib.py")
    libraries: set[Any] = set()
    """Code that was found not to be the script's."""

    def around_enter(original: Any, args: Any, kwargs: Any) -> Any:
        frame = sys._getframe(2)
        if frame.f_code not in libraries and watcher.here():
            watcher.safely("evaluation", opened, args[0], frame)
        return original(*args, **kwargs)

    def opened(context: Any, frame: Any) -> None:
        if isinstance(context, torch.set_grad_enabled) and context.mode:
            return
        if frame.f_code.co_filename.endswith(decorator):  # whose function is it that was decorated?
            code = getattr(frame.f_locals.get("func"), "__code__", None)
            by_user = code is not None and is_users(code.co_filename)
        else:
            by_user = is_users(frame.f_code.co_filename)
            if not by_user:
                libraries.add(frame.f_code)
        if by_user:
            context._surefoot = True
            watcher.evaluations.open()

    def around_exit(original: Any, args: Any, kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if watcher.here() and getattr(args[0], "_surefoot", False):
            watcher.safely("evaluation", watcher.evaluations.close)
        return result

    for context in (torch.no_grad, torch.inference_mode, torch.set_grad_enabled):
        wrapping.around(context, "__enter__", around_enter)
        wrapping.around(context, "__exit__", around_exit)


def wrap_compiling(watcher: Watcher, wrapping: Wrapping) -> None:
    """From the first compilation on, models are followed from outside only."""
    followed: set[type] = set()

    def compiled(original: Any, args: Any, kwargs: Any) -> Any:
        # A compiled function guards on the modes and hooks that are on: both stay off from here.
        if not watcher.compiled:
            watcher.compiled = True
            watcher.safely("looking", watcher.end_look)
            if watcher.blackbox is not None:
                watcher.safely("incidents", watcher.blackbox.compiled)
        result = original(*args, **kwargs)
        kind = type(result)
        if kind.__name__ == "OptimizedModule" and kind not in followed:
            followed.add(kind)
            wrapping.around(kind, "__call__", around_call)
        return result

    def around_call(original: Any, args: Any, kwargs: Any) -> Any:
        """A compiled model is followed from outside."""
        out = original(*args, **kwargs)
        if watcher.look is not None and watcher.here():
            watcher.safely("model calls", watcher.look.note_compiled, args[0], args[1:], kwargs, out)
        return out

    wrapping.around(torch, "compile", compiled)
    wrapping.around(nn.Module, "compile", compiled)
