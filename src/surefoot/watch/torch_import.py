"""Calls a function when the script imports torch.

surefoot must not import torch itself: scripts set `CUDA_VISIBLE_DEVICES` or `OMP_NUM_THREADS` first, and some never
import it. So a finder at the front of `sys.meta_path` lets the real finders find torch, and calls back when torch's
import has finished. Checking whether torch exists (`importlib.util.find_spec`) does not trigger it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call a function when the module has been imported: immediately, if it already is."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder:
    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name, self.call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                    return spec
        return None

    def arrived(self) -> None:
        """The module was imported: remove this finder and call the function."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self.call()


class _Loader:
    """Wraps the module's real loader, and calls the finder afterwards."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.arrived()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
