"""Which files a run of `surefoot bisect` or `surefoot replay` may change, and the hook that enforces it.

The run works in a scratch folder that looks like the script's own (see `experiments.scratch_folder`); what it writes
there is discarded. A file that is only linked there, from beside or above the working directory, is replaced with a
copy before it is written to. A file elsewhere that existed before the experiments began cannot be written to, renamed
or removed: the script gets a `PermissionError`, and `surefoot bisect` prints the reason.

An audit hook does this; Python calls it for every file that it opens. The hook is installed before the script begins,
so this module imports nothing that takes long. Caches may be written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypedDict

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CACHES = (
    "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY", "NUMBA_CACHE_DIR", "MPLCONFIGDIR", "SCIKIT_LEARN_DATA", "NLTK_DATA", "KERAS_HOME",
)  # fmt: skip
_HOMES = ("~/.cache", "~/.nv", "~/.triton", "~/.config/matplotlib", "~/.keras", "~/nltk_data", "~/scikit_learn_data")
_CHANGES = ("os.remove", "os.rename", "os.truncate", "os.rmdir", "shutil.rmtree", "os.chmod", "os.chown", "os.utime",
            "os.setxattr", "os.removexattr")  # fmt: skip
_FOLLOWS = ("os.truncate", "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr")


def free_folders() -> list[str]:
    """Folders of the machine that any run may write to: devices and caches."""
    homes = [*map(os.path.expanduser, _HOMES), *map(os.environ.get, _CACHES)]
    return [os.path.realpath(home) for home in ("/dev", "/proc", "/tmp/nvidia-mps", *homes) if home]


def missing_caches(temporary: str) -> dict[str, str]:
    """Settings that move caches whose folder does not exist into a temporary folder.

    A run that may not write to the home folder could not create them.
    """
    own = {"XDG_CACHE_HOME": "~/.cache", "CUDA_CACHE_PATH": "~/.nv", "TRITON_HOME": "~/.triton"}
    return {
        name: temporary
        for name, folder in own.items()
        if name not in os.environ and not os.path.isdir(os.path.expanduser(folder))
    }


class WriteRules(TypedDict, total=False):
    """Which files a run may change: a part of its order."""

    scratch: str
    """The folder with the run's own copies, which may be written to."""
    out: str | None
    """The folder of the results, which may be written to."""
    writable: list[str]
    """Other folders that may be written to."""
    began: float
    """When the runs began, in seconds since the epoch: older files elsewhere belong to the user."""


_early: list[Guard] = []
"""The guard that was installed before torch was imported."""


def guard_early(order: WriteRules) -> None:
    """Protect the files from now on; `protect` returns the same guard later."""
    _early.append(_installed(order))


def _installed(order: WriteRules) -> Guard:
    guard = Guard(order)
    sys.addaudithook(guard.on_audit)
    return guard


def protect(order: WriteRules) -> Guard:
    """Check every file that is written from now on, including those that torch and safetensors open themselves.

    Files that other native libraries open by absolute path, and files of processes that the script starts, are not
    seen: the kernel confines the runs where possible (`experiments.sandbox`).
    """
    import safetensors.numpy
    import safetensors.torch
    import torch

    from surefoot.watch.patches.hooks import around

    guard = _early[0] if _early else _installed(order)

    def saves(name: str) -> Callable[..., Any]:
        def call(original: Any, args: Any, kwargs: Any) -> Any:
            guard.before_writing(args[1] if len(args) > 1 else kwargs.get(name), keeps=False)
            return original(*args, **kwargs)

        return call

    around(torch.serialization, "save", saves("f"))
    for module in (safetensors, safetensors.torch, safetensors.numpy):  # written in Rust: audit hooks do not see it
        around(module, "serialize_file", saves("filename"))
    return guard


class Guard:
    """Decides which files may be written."""

    def __init__(self, order: WriteRules) -> None:
        self.refused: str | None = None
        """The first file that the script was not allowed to change."""
        self.outside: list[str] = []
        """New files elsewhere."""
        self._scratch = os.path.realpath(order["scratch"]) if order.get("scratch") else None
        self._began = float(order.get("began") or 0.0)
        own = (os.path.realpath(home) for home in (self._scratch, order.get("out")) if home)
        self._free = (*own, *free_folders(), *map(os.path.realpath, order.get("writable") or ()))
        self._process = os.getpid()
        self._busy = False

    def on_audit(self, event: str, args: Any) -> None:
        """Called with each audit event, before Python performs the operation."""
        try:
            self._check_event(event, args)
        except PermissionError:
            raise
        except Exception:
            return  # an invalid path: the called function raises its own error

    def _check_event(self, event: str, args: Any) -> None:
        if event == "open":
            path, mode, flags = args
            writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITES)
            if writes:
                self.before_writing(path, keeps=not isinstance(mode, str) or "w" not in mode)
        elif event == "sqlite3.connect":  # the library opens the file itself, and may only read it
            self.make_own(args[0])
        elif event in _CHANGES:
            self.before_writing(args[0], keeps=True, follow=event in _FOLLOWS)
            if event == "os.rename":
                self.before_writing(args[1], keeps=True, follow=False)

    def before_writing(self, path: Any, keeps: bool, follow: bool = True) -> None:
        """Replace a link with a copy, or refuse if the file belongs to the user."""
        if self._busy or os.getpid() != self._process or not isinstance(path, (str, bytes, os.PathLike)):
            return
        self._busy = True
        try:
            name = os.path.abspath(os.fsdecode(path))
            if follow and os.path.islink(name) and self._is_ours(os.path.dirname(name)):
                _make_own(name, keeps)
            folder = os.path.realpath(os.path.dirname(name))
            real = os.path.realpath(name) if follow else os.path.join(folder, os.path.basename(name))
            if not self._is_ours(real):
                self._check(real)
        finally:
            self._busy = False

    def make_own(self, path: Any) -> None:
        """Replace a link in the scratch folder with a copy. Other paths are not changed."""
        if not self._busy and os.getpid() == self._process and isinstance(path, (str, bytes, os.PathLike)):
            self._busy = True
            try:
                name = os.path.abspath(os.fsdecode(path))
                if os.path.islink(name) and os.path.isfile(name) and self._is_ours(os.path.dirname(name)):
                    _make_own(name, keeps=True)
            finally:
                self._busy = False

    def _is_ours(self, path: str) -> bool:
        path = os.path.realpath(path) if os.path.isdir(path) else path
        return any(path == home or path.startswith(home + os.sep) for home in self._free)

    def _check(self, path: str) -> None:
        try:
            found = os.lstat(path)
        except OSError:
            if len(self.outside) < 8:
                self.outside.append(path)
            return
        if max(found.st_ctime, found.st_mtime) < self._began:
            self.refused = self.refused or path
            raise PermissionError(
                f"{path} existed before surefoot ran this script again, and must not be changed. Make the "
                "script write inside its working directory."
            )


def _make_own(link: str, keeps: bool) -> None:
    """Replace a link with a copy of the file, or with nothing."""
    import shutil

    target = os.path.realpath(link)
    os.unlink(link)
    if keeps and os.path.isfile(target):
        shutil.copyfile(target, link)
