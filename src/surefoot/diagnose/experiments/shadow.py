"""A folder that looks like another one, and can be written to without harm.

A script is run many times; each run works in its own shadow of the working directory. Small files are copied and large
ones become links (a run breaks a link before it writes to it: see `launch.changes.outputs`). A folder is made anew with
all that is in it, so that new files, removals and renames stay in the shadow; one that holds a great deal is data, and
becomes a link as a whole, so that walking through it works. Folders that by their name hold results are made anew even
then, with links inside. What lies beside and above the working directory is linked, so that `../data` is found.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

COPIED_BYTES = 4 << 20
"""Files up to this size are copied."""
ALL_COPIED_BYTES = 64 << 20
"""When so much has been copied, the rest are links."""
MOST_ENTRIES = 1_000
"""A folder with more files and folders in it, at any depth, becomes a link."""
MOST_BESIDE = 500
"""So many neighbours of the working directory are linked, and of the folder it lies in."""
_RESULTS = {"runs", "logs", "log", "out", "output", "outputs", "results", "checkpoints", "checkpoint", "ckpt", "ckpts",
            "saved", "models", "weights", "wandb", "mlruns", "lightning_logs", "tb_logs", "artifacts"}  # fmt: skip
_LEVELS_ABOVE = 2
SCRATCH = ("surefoot-bisect-", "surefoot-replay-")
"""How the names of the folders begin that shadows are in."""


def make(source: Path, scratch: Path, leave_out: Path) -> Path:
    """Make a shadow of `source` below `scratch`, without the folder `leave_out`, and return where it is.

    Neither is there another shadow in it, should the working directory be that of temporary files.
    """
    above = list(source.parents)[:_LEVELS_ABOVE][::-1]
    place = scratch
    for folder, inner in zip(above, [*above, source][1:], strict=True):
        place = place / (folder.name or "root")
        place.mkdir(parents=True)
        _link_all(folder, place, leave_out=inner)
    target = place / (source.name or "work")
    target.mkdir(parents=True)
    _Shadow(leave_out).fill(source, target)
    return target


class _Shadow:
    """Keeps count of what was copied."""

    def __init__(self, leave_out: Path) -> None:
        self.leave_out = leave_out
        self.copied = 0

    def fill(self, real: Path, place: Path) -> None:
        for entry in _entries(real):
            path, made = Path(entry.path), place / entry.name
            if path == self.leave_out or entry.name == "__pycache__" or entry.name.startswith(SCRATCH):
                continue
            if entry.is_dir(follow_symlinks=False):
                self._folder(path, made)
            elif not entry.is_file(follow_symlinks=False) or not self._copy(path, made):
                _link(path, made)

    def _folder(self, path: Path, made: Path) -> None:
        if not _holds_more(path, MOST_ENTRIES):
            made.mkdir()
            self.fill(path, made)
        elif path.name.lower() in _RESULTS:
            made.mkdir()
            _link_all(path, made, self.leave_out)
        else:
            _link(path, made)

    def _copy(self, path: Path, made: Path) -> bool:
        try:
            size = path.stat().st_size
            if size > COPIED_BYTES or self.copied + size > ALL_COPIED_BYTES:
                return False
            shutil.copy2(path, made)
        except OSError:
            return False
        self.copied += size
        return True


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []  # the script could not read it either


def _holds_more(folder: Path, limit: int) -> bool:
    count = 0
    for _, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        if count > limit:
            return True
    return False


def _link_all(folder: Path, place: Path, leave_out: Path) -> None:
    for entry in _entries(folder)[:MOST_BESIDE]:
        if Path(entry.path) != leave_out:
            _link(Path(entry.path), place / entry.name)


def _link(path: Path, made: Path) -> None:
    made.symlink_to(path.resolve())
