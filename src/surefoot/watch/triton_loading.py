"""Loads Triton in the background, so that the first step does not wait for it.

Before its first kernel, Triton reads and hashes its own library of some hundred megabytes: with the import, most of a
second. Until a thread has done that, what is observed on a CUDA device is measured with plain operations. A guard that
decides about steps does not use this: its decisions must not depend on when a thread has finished.
"""

from __future__ import annotations

import importlib
import os
import sys
from threading import Thread
from typing import TYPE_CHECKING

from surefoot.core import device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

_LIBRARY = "triton"
_KEY = "triton_key"
_MODULES_OF_KEY = ("triton.runtime.cache", "triton.compiler.compiler")
"""The modules that define the function with the hash, in newer and older versions. It remembers its result."""
_LONGEST_JOIN = 5.0
"""A fork waits this many seconds for the thread: a child must not inherit a module that is being imported."""


def load_in_background(
    devices: Iterable[torch.device], is_observing: Callable[[], bool], modules: tuple[str, ...] = _MODULES_OF_KEY
) -> Thread | None:
    """Start to load Triton if a device needs it and nothing has imported it; returns the thread.

    `is_observing` returns whether surefoot's code that is running only observes.
    """
    if _LIBRARY in sys.modules or not any(map(device.runs_triton, devices)):
        return None
    thread = Thread(target=_load, args=(modules,), name="surefoot-triton", daemon=True)
    os.register_at_fork(before=lambda: thread.join(_LONGEST_JOIN) if thread.is_alive() else None)
    thread.start()
    device.load_triton_with(thread, is_observing)
    return thread


def _load(modules: tuple[str, ...]) -> None:
    for name in modules:
        try:
            key = getattr(importlib.import_module(name), _KEY, None)
        except Exception:  # a torch build without Triton, or a Triton that does not load: plain operations are used
            return
        if key is not None:
            key()
            return
