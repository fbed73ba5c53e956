"""Calls listeners before and after every `backward` of this process.

A loop that calls `loss.backward()` itself, and not `stabilizer.backward(loss)`, does not show where a microbatch ends
and what its loss is. So `torch.autograd.backward`, which `Tensor.backward` calls, is hooked while there is a listener.
The function itself is not replaced (`core.function_hooks`), and listeners are held weakly. A backward inside another
one, as in reentrant activation checkpointing, is part of the outer one.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from surefoot.core.function_hooks import Hook, add_hook, remove_hook


class BackwardListener(Protocol):
    """Called before and after every backward, on the thread that runs it. Must not raise."""

    def before_backward(self) -> None:
        """A backward is about to run."""

    def ran_backward(self, root: Tensor) -> None:
        """Backward has run on a tensor."""


class _OfThread(threading.local):
    in_backward = False
    """Whether this thread is running a backward."""


_listeners: list[weakref.ref[BackwardListener]] = []
_thread = _OfThread()
_is_hooked = False


def listen(listener: BackwardListener) -> None:
    """Call `listener` with every backward from now on, as long as it exists, or until `stop_listening`."""
    global _is_hooked
    if not _is_hooked:
        add_hook(torch.autograd.backward, _HOOK, always=True)
        _is_hooked = True
    _listeners[:] = [reference for reference in _listeners if reference() is not None]
    _listeners.append(weakref.ref(listener))


def stop_listening(listener: BackwardListener) -> None:
    """Stop calling `listener`. Without listeners, torch's function is restored, unless other code hooks it too."""
    global _is_hooked
    _listeners[:] = [each for each in _listeners if each() is not None and each() is not listener]
    if _is_hooked and not _listeners:
        remove_hook(torch.autograd.backward, _HOOK)
        _is_hooked = False


def _alive() -> list[BackwardListener]:
    return [listener for reference in tuple(_listeners) if (listener := reference()) is not None]


def _begins(args: Any, kwargs: Any) -> Any:
    roots = args[0]
    root = roots[0] if isinstance(roots, (list, tuple)) and roots else roots
    if not _listeners or _thread.in_backward or not isinstance(root, Tensor):
        return None
    _thread.in_backward = True
    for listener in _alive():
        listener.before_backward()
    return (root,)


def _ended(token: Any, result: Any) -> None:
    for listener in _alive():
        listener.ran_backward(*token)


def _left(token: Any) -> None:
    _thread.in_backward = False


_HOOK = Hook(_begins, _ended, _left)
