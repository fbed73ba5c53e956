"""A folder that looks like another one, and can be written to without harm.

A script is run many times; each run works in its own shadow of the working directory. Small files are copied, large
ones and what is beyond the limits become links to the real ones (the run breaks a link before it writes to it: see
`launch.changes.outputs`). Folders are made anew, so that new files, removals and renames stay in the shadow.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from pathlib import Path

COPIED_BYTES = 4 << 20
"""Files up to this size are copied."""
ALL_COPIED_BYTES = 64 << 20
"""When so much has been copied, the rest are links."""
MOST_ENTRIES = 3_000
"""When so many files and folders have been made, what is left below becomes a link each."""
_WHOLE = {".git", ".hg", ".svn", ".venv", "venv", "node_modules", ".tox", ".mypy_cache", ".ruff_cache", "site-packages"}
"""Folders that a training script only reads."""


def make(source: Path, target: Path, leave_out: Path) -> None:
    """Make `target` a shadow of `source`, without the folder `leave_out`."""
    target.mkdir(parents=True)
    waiting = deque([(source, target)])
    made = copied = 0
    while waiting:
        real, shadow = waiting.popleft()
        try:
            entries = sorted(os.scandir(real), key=lambda entry: entry.name)
        except OSError:
            continue  # not readable for the script either
        for entry in entries:
            path, place = Path(entry.path), shadow / entry.name
            if path == leave_out or entry.name == "__pycache__":
                continue
            made += 1
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and entry.name not in _WHOLE and made <= MOST_ENTRIES:
                place.mkdir()
                waiting.append((path, place))
                continue
            size = entry.stat(follow_symlinks=False).st_size
            small = size <= COPIED_BYTES and copied + size <= ALL_COPIED_BYTES and made <= MOST_ENTRIES
            if entry.is_file(follow_symlinks=False) and small and _copy(path, place):
                copied += size
            else:
                place.symlink_to(path.resolve())


def _copy(path: Path, place: Path) -> bool:
    try:
        shutil.copy2(path, place)
    except OSError:
        return False
    return True
