"""Calls listeners with every batch that a `DataLoader` returns in this process.

A loop that iterates over its loader, and not over `stabilizer.resume(loader)`, does not show its current batch. So the
one method through which every iterator of every `DataLoader` goes is hooked, from the first call of `add_listener` on.
The hook costs well under a microsecond, does not replace the method (`core.function_hooks`), and holds listeners
weakly.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from torch.utils.data.dataloader import _BaseDataLoaderIter

from surefoot.core.function_hooks import Hook, add_hook


class Listener(Protocol):
    """Called with every batch."""

    def loader_drew(self, batch: Any) -> Any:
        """A loader has returned a batch; the result of this method replaces it."""


_listeners: list[weakref.ref[Listener]] = []
_process = os.getpid()
_is_hooked = False


def add_listener(listener: Listener) -> None:
    """Call `listener` with every batch from now on, as long as it exists."""
    global _process, _is_hooked
    if not _is_hooked:
        add_hook(_BaseDataLoaderIter.__next__, Hook(_asked, _drew))
        _is_hooked = True
    _process = os.getpid()  # workers are forked later; their loaders are not reported
    _listeners[:] = [reference for reference in _listeners if reference() is not None]
    _listeners.append(weakref.ref(listener))


def _asked(args: Any, kwargs: Any) -> Any:
    return True if _listeners and os.getpid() == _process else None


def _drew(token: Any, batch: Any) -> Any:
    for reference in tuple(_listeners):
        listener = reference()
        if listener is not None:
            batch = listener.loader_drew(batch)
    return batch
