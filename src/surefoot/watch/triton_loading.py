"""Loads Triton in the background, so that no step waits for it.

Before its first kernel, Triton reads and hashes its own library of some hundred megabytes, which takes about half a
second; importing it takes as long. A thread does both, and until it has, what is observed on a CUDA device is measured
with plain operations. Hashing does not disturb the script; an import slows it down, because Python runs one thread at a
time. So if the script has not imported Triton itself, the thread starts after the first steps: a short run does without
Triton. A guard that decides about steps does not use this: its decisions must not depend on when a thread has finished.
"""

from __future__ import annotations

import importlib
import os
import sys
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LIBRARY = "triton"
_KEY = "triton_key"
_MODULES_OF_KEY = ("triton.runtime.cache", "triton.compiler.compiler")
"""The modules that define the function with the hash, in newer and older versions. It remembers its result."""
IMPORT_AT_STEP = 64
"""The step at which Triton is imported if the script has not done so."""
_LONGEST_JOIN = 5.0
"""A fork waits this many seconds for the thread: a child must not inherit a module that is being imported."""


class TritonLoader:
    """Starts the thread, once, when Triton is first wanted and may be loaded."""

    def __init__(self, may_import: Callable[[], bool], modules: tuple[str, ...] = _MODULES_OF_KEY) -> None:
        """`may_import` returns whether Triton may be imported if nothing else has imported it."""
        self._may_import, self._modules = may_import, modules
        self._thread: Thread | None = None

    def is_loaded(self) -> bool:
        """Whether Triton is loaded, or cannot be loaded. If not, loading begins as soon as it may."""
        if self._thread is not None:
            return not self._thread.is_alive()
        if _LIBRARY in sys.modules or self._may_import():
            thread = Thread(target=_load, args=(self._modules,), name="surefoot-triton", daemon=True)
            os.register_at_fork(before=lambda: thread.join(_LONGEST_JOIN) if thread.is_alive() else None)
            thread.start()
            self._thread = thread
        return False


def _load(modules: tuple[str, ...]) -> None:
    for name in modules:
        try:
            key = getattr(importlib.import_module(name), _KEY, None)
        except Exception:  # a torch build without Triton, or a Triton that does not load: plain operations are used
            return
        if key is not None:
            key()
            return
