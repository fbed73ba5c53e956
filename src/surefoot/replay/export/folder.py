"""The folder of a reproduction: which files are in it, and whether a folder may become one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT, TENSORS, README = "reproduce.py", "tensors.safetensors", "README.md"


def usable(folder: Path) -> Path:
    """The folder, if it is not there yet, empty, or a reproduction that may be replaced."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a reproduction is a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SCRIPT).exists():
        raise UsageError(f"{folder} holds other files; give a folder that is empty or not there yet")
    return folder


def clear(folder: Path) -> None:
    """Take away what a reproduction is made of."""
    for name in (SCRIPT, TENSORS, README):
        (folder / name).unlink(missing_ok=True)
