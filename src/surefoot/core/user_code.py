"""Which source files belong to the user, how a line of theirs is named, and the text of the named lines."""

from __future__ import annotations

import os
import sysconfig

from surefoot.core.files import read_file

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder of this package."""
PACKAGES = ("site-packages", "dist-packages")
"""Folders that hold installed packages."""
_LIBRARIES = tuple(
    {os.path.realpath(path) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")
     if (path := sysconfig.get_path(key))}
    | {path + os.sep for key in ("stdlib", "purelib") if (path := sysconfig.get_path(key))}
)  # fmt: skip
MOST_LINES = 1_000
"""The maximum number of named lines whose text is kept."""
_LONGEST_LINE = 200
_LARGEST_FILE = 1 << 20
_own_files: dict[str, bool] = {}
_places: dict[str, str] = {}
_texts: dict[str, list[bytes]] = {}
_named: dict[str, tuple[str, int]] = {}


def is_users(filename: str) -> bool:
    """Whether a source file belongs to the user: not to torch, the standard library or surefoot (except its zoo)."""
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
    """A file and line in readable form."""
    known = _places.get(filename)
    if known is None:
        relative = os.path.relpath(filename)
        known = _places[filename] = relative if not relative.startswith("..") else filename
        _texts[filename] = _lines_of(filename)
    name = f"{known}:{line}"
    if len(_named) < MOST_LINES:
        _named[name] = filename, line
    return name


def source_lines() -> dict[str, str]:
    """The text of each line that `place` has named. Files are read at their first use: they may be edited later."""
    found = {}
    for name, (filename, line) in list(_named.items()):
        lines = _texts.get(filename, [])
        text = lines[line - 1].decode("utf-8", "replace").strip() if 0 < line <= len(lines) else ""
        if text:
            found[name] = text[:_LONGEST_LINE]
    return found


def _lines_of(filename: str) -> list[bytes]:
    """The lines of a file; none if it cannot be read or is very large."""
    try:
        if not is_users(filename) or os.path.getsize(filename) > _LARGEST_FILE:
            return []
        return read_file(filename).splitlines()
    except (OSError, ValueError):
        return []
