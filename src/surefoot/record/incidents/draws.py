"""Hear of every batch that a `DataLoader` hands out in this process.

A loop that iterates over its loader, and not over `stabilizer.resume(loader)`, tells nobody which batch it is on. So
the one method through which every iterator of every `DataLoader` goes is wrapped, the first time somebody listens. It
costs well under a microsecond, returns what it always did, and listeners are held weakly.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any, Protocol

from torch.utils.data.dataloader import _BaseDataLoaderIter


class Listener(Protocol):
    """Who wants to know."""

    def loader_drew(self, batch: Any) -> Any:
        """A loader has handed out a batch; what it is handed out instead is returned."""


_listeners: list[weakref.ref[Listener]] = []
_process = os.getpid()


def listen(listener: Listener) -> None:
    """Tell `listener` of every batch from here on, for as long as it lives."""
    global _process
    if not hasattr(_BaseDataLoaderIter.__next__, "_surefoot_heard"):
        _wrap()
    _process = os.getpid()  # workers are forked later, and their own loaders are nobody's business here
    _listeners[:] = [held for held in _listeners if held() is not None]
    _listeners.append(weakref.ref(listener))


def _wrap() -> None:
    original = _BaseDataLoaderIter.__next__

    @functools.wraps(original)
    def heard(self: Any) -> Any:
        batch = original(self)
        if _listeners and os.getpid() == _process:
            for held in tuple(_listeners):
                listener = held()
                if listener is not None:
                    batch = listener.loader_drew(batch)
        return batch

    heard._surefoot_heard = True  # type: ignore[attr-defined]
    _BaseDataLoaderIter.__next__ = heard  # type: ignore[method-assign]
