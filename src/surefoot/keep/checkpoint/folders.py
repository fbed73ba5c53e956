"""Folders that appear completely or not at all, and the cleanup of unfinished ones.

A new folder is written under a hidden name in the same directory, synced to disk and renamed. An existing one is moved
aside first, and restored by `sweep` if the process dies in between. A folder that is deleted gets a hidden name first,
so that half a folder is never visible.

Hidden names contain the id and the start time of their process (ids are reused, especially in containers), so that
leftovers of dead processes can be distinguished from work in progress on the same machine. A process on another machine
is not visible; give each rank its own names.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from surefoot.core.activity import started_at, state_of

if TYPE_CHECKING:
    from pathlib import Path

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)-(?P<born>\d+)-[0-9a-f]{8}\.(?P<why>part|old|gone)")


@contextmanager
def new_folder(place: Path, choose: Callable[[], Path] | None = None) -> Iterator[Path]:
    """Yields a hidden folder to fill; it is renamed to `place` after the body, and deleted if the body raises.

    `choose` returns another final place in the same directory, if that depends on the content.
    """
    make_folder(place.parent)
    hidden = _hidden_beside(place, "part")
    try:
        hidden.mkdir()
        yield hidden
        sync(hidden)
        _put_in_place(hidden, place if choose is None else choose())
    except BaseException:
        _remove(hidden)
        raise


def make_folder(path: Path) -> None:
    """Create a folder and its parents, so that they survive a power failure."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(folder: Path) -> None:
    """Delete a folder: hide it by renaming, then delete file by file."""
    gone = _hidden_beside(folder, "gone")
    folder.rename(gone)
    _remove(gone)


def sweep(parent: Path, ours: Callable[[str], bool]) -> None:
    """Remove unfinished work of dead processes, for folders whose name `ours` accepts.

    A complete folder that was moved aside for a new one is restored if the new one was never completed.
    """
    for path in list(parent.iterdir()):
        found = _HIDDEN.fullmatch(path.name)
        if found is None or not ours(found["name"]) or _alive(int(found["pid"]), int(found["born"])):
            continue
        place = path.with_name(found["name"])
        if found["why"] == "old" and not os.path.lexists(place):
            path.rename(place)
        else:
            _remove(path)


def _hidden_beside(place: Path, why: str) -> Path:
    pid = os.getpid()
    return place.with_name(f".{place.name}.{pid}-{started_at(pid) or 0}-{os.urandom(4).hex()}.{why}")


def _put_in_place(hidden: Path, place: Path) -> None:
    aside = _hidden_beside(place, "old") if os.path.lexists(place) else None
    if aside is not None:
        place.rename(aside)
    try:
        hidden.rename(place)
    except BaseException:
        if aside is not None:
            aside.rename(place)
        raise
    sync(place.parent)
    if aside is not None:
        _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _alive(pid: int, born: int) -> bool:
    state = state_of(pid, born)
    if state is not None:
        return state != "gone"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
