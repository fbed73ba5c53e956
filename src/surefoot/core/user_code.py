"""Which source files are the user's, how a line of theirs is named, and the text of named lines and those around."""

from __future__ import annotations

import os
import sysconfig
from typing import TYPE_CHECKING

from surefoot.core.files import read_file
from surefoot.core.source_text import without_secrets

if TYPE_CHECKING:
    from types import FrameType

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
"""The maximum number of named lines whose text is kept, and of all lines with those around them."""
LINES_AROUND = 3
"""The number of lines before and after a named one that are kept."""
_LONGEST_LINE = 200
_LARGEST_FILE = 1 << 18
_own_files: dict[str, bool] = {}
_places: dict[str, str] = {}
_texts: dict[str, list[bytes]] = {}
_shown: dict[str, list[str]] = {}
_named: dict[str, tuple[str, int]] = {}


def is_users(filename: str) -> bool:
    """Whether a source file belongs to the user: not to torch, the standard library or surefoot (except its zoo)."""
    known = _own_files.get(filename)
    if known is None:
        known = _own_files[filename] = _judge(filename)
    return known


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code, from a frame outwards. Called for every recorded call, so in one loop."""
    known = _own_files
    while frame is not None:
        filename = frame.f_code.co_filename
        is_own = known.get(filename)
        if is_users(filename) if is_own is None else is_own:
            break
        frame = frame.f_back
    return frame


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
    """The text of each line that `place` has named and of those around it, without secrets, by file and line.

    Files are read at their first use: they may be edited later.
    """
    found: dict[str, str] = {}
    for name, (filename, line) in list(_named.items()):
        lines = _shown_lines(filename)
        for number in range(max(1, line - LINES_AROUND), min(line + LINES_AROUND, len(lines)) + 1):
            key = f"{name.rpartition(':')[0]}:{number}"
            if len(found) < MOST_LINES or number == line:
                found[key] = lines[number - 1][:_LONGEST_LINE]
    return {key: text for key, text in found.items() if text}


def _shown_lines(filename: str) -> list[str]:
    """The lines of a file of the user, without secrets."""
    known = _shown.get(filename)
    if known is None:
        lines = [line.decode("utf-8", "replace").expandtabs(4).rstrip() for line in _texts.get(filename, [])]
        known = _shown[filename] = without_secrets(lines)
    return known


def _lines_of(filename: str) -> list[bytes]:
    """The lines of a file; none if it cannot be read or is very large."""
    try:
        if not is_users(filename) or os.path.getsize(filename) > _LARGEST_FILE:
            return []
        return read_file(filename).splitlines()
    except (OSError, ValueError):
        return []
