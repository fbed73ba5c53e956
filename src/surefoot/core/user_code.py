"""Which source files are the user's own, and how a line of theirs is written."""

from __future__ import annotations

import os
import sysconfig

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder of this package."""
PACKAGES = ("site-packages", "dist-packages")
"""Folders that hold installed packages."""
_LIBRARIES = tuple(
    {os.path.realpath(path) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")
     if (path := sysconfig.get_path(key))}
    | {path + os.sep for key in ("stdlib", "purelib") if (path := sysconfig.get_path(key))}
)  # fmt: skip
_own_files: dict[str, bool] = {}
_places: dict[str, str] = {}


def is_users(filename: str) -> bool:
    """Whether a source file is the user's: not torch, not the standard library, not surefoot (but its zoo is)."""
    known = _own_files.get(filename)
    if known is None:
        known = _own_files[filename] = _judge(filename)
    return known


def _judge(filename: str) -> bool:
    if filename.startswith("<") and not filename.startswith(("<ipython", "<stdin")):
        return False
    zoo = tuple(os.path.join(HERE, "zoo", name) for name in ("t", "ranks"))
    if filename.startswith(HERE + os.sep) and not filename.startswith(zoo):
        return False
    if filename.startswith(zoo):
        return True
    return not (filename.startswith(_LIBRARIES) or any(folder in filename for folder in PACKAGES))


def place(filename: str, line: int) -> str:
    """A file and line as a person would write them."""
    known = _places.get(filename)
    if known is None:
        relative = os.path.relpath(filename)
        known = _places[filename] = relative if not relative.startswith("..") else filename
    return f"{known}:{line}"
