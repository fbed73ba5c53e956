"""The script's files stay as they are while it is run again and again.

The run works in a scratch folder that looks like the script's own (see `diagnose.experiments.shadow`): what it writes
there is thrown away. Two things are left to do here. A large file of the scratch folder is only a link to the real
one: it becomes a file of its own before it is written to. And a file elsewhere that was there before the experiments
began is not written to, renamed or removed: the script gets a `PermissionError`, and `surefoot bisect` says why.

This is done by an audit hook, which hears of every file that Python opens, and by a look at `torch.save` and at
safetensors, which open files by themselves. Files that other native libraries open under absolute paths, and those of
processes that the script starts, are not seen. Caches may be written.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, Protocol

import safetensors.numpy
import safetensors.torch
import torch

from surefoot.launch.patches.wrapping import around

if TYPE_CHECKING:
    from collections.abc import Callable

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR")


class Protected(Protocol):
    """A run whose files are looked after."""

    order: dict[str, Any]
    """`scratch` and `out` are folders that may be written to; `began` is when the first run was started."""
    refused: str | None
    """The first file that the script was not allowed to change."""
    outside: list[str]
    """New files elsewhere."""


def protect(run: Protected) -> None:
    """Watch over every file that is written from now on."""
    guard = Guard(run)
    sys.addaudithook(guard.hear)

    def saves(position: int, name: str) -> Callable[..., Any]:
        def call(original: Any, args: Any, kwargs: Any) -> Any:
            guard.before_writing(args[position] if len(args) > position else kwargs.get(name), keeps=False)
            return original(*args, **kwargs)

        return call

    around(torch.serialization, "save", saves(1, "f"))
    for module in (safetensors, safetensors.torch, safetensors.numpy):  # written in Rust, which no hook hears of
        around(module, "serialize_file", saves(1, "filename"))


class Guard:
    """Knows which files are whose."""

    def __init__(self, run: Protected) -> None:
        order = run.order
        self._run = run
        self._scratch = os.path.realpath(order["scratch"]) if order.get("scratch") else None
        self._began = float(order.get("began") or 0.0)
        homes = [order.get("out"), "/dev", "/proc", os.path.expanduser("~/.cache"), *map(os.environ.get, _CACHES)]
        self._free = tuple(os.path.realpath(home) for home in [self._scratch, *homes] if home)
        self._process = os.getpid()
        self._busy = False

    def hear(self, event: str, args: Any) -> None:
        """Of anything Python is about to do."""
        try:
            self._hear(event, args)
        except PermissionError:
            raise
        except Exception:
            return  # an odd path: the script will be told so by what it called

    def _hear(self, event: str, args: Any) -> None:
        if event == "open":
            path, mode, flags = args
            writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITES)
            if writes:
                self.before_writing(path, keeps=not isinstance(mode, str) or "w" not in mode)
        elif event in ("os.remove", "os.rename", "os.truncate", "os.rmdir", "shutil.rmtree"):
            self.before_writing(args[0], keeps=True, follow=event == "os.truncate")
            if event == "os.rename":
                self.before_writing(args[1], keeps=True, follow=False)

    def before_writing(self, path: Any, keeps: bool, follow: bool = True) -> None:
        """Make a link a file of its own; refuse what is the user's."""
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

    def _is_ours(self, path: str) -> bool:
        path = os.path.realpath(path) if os.path.isdir(path) else path
        return any(path == home or path.startswith(home + os.sep) for home in self._free)

    def _check(self, path: str) -> None:
        try:
            found = os.lstat(path)
        except OSError:
            if len(self._run.outside) < 8:
                self._run.outside.append(path)
            return
        if max(found.st_ctime, found.st_mtime) < self._began:
            self._run.refused = self._run.refused or path
            raise PermissionError(
                f"{path} was there before surefoot ran this script again, and must not be changed by that. Have the "
                "script write inside its working directory."
            )


def _make_own(link: str, keeps: bool) -> None:
    """Put a copy of the file, or nothing, in the place of a link to it."""
    target = os.path.realpath(link)
    os.unlink(link)
    if keeps and os.path.isfile(target):
        shutil.copyfile(target, link)
