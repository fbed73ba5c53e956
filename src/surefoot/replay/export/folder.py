"""The folder of a reproduction: its files, and whether a folder may be used for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT, TENSORS, README = "reproduce.py", "tensors.safetensors", "README.md"


def usable(folder: Path) -> Path:
    """The folder, if it does not exist, is empty, or contains a reproduction that may be replaced."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a reproduction is a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SCRIPT).exists():
        raise UsageError(f"{folder} contains other files. Use an empty or new folder")
    return folder


def clear(folder: Path) -> None:
    """Remove the files of a reproduction."""
    for name in (SCRIPT, TENSORS, README):
        (folder / name).unlink(missing_ok=True)
