"""A copy of a folder that a script can write to without changing the original.

A script is run many times; each run works in its own copy of the working directory. Every file in it is a copy, so the
original cannot change, whatever writes: Python, sqlite, a memory map, a C library, another process. If the file system
can share the blocks of a copy until one side is written to (btrfs, XFS, …), this costs nothing. Otherwise there is a
limit, and above it the user is asked to name the folders that the script only reads (`--share`), which become links.
Links are also used for virtual environments, for links that lead to a folder outside the working directory, and for
what is beside and above the working directory, so that `../data` is found. These are not part of the working directory;
`experiments.changes.guard` handles writes to them.

Links within the working directory point to the same place in the copy, hard links stay hard links, holes in a file stay
holes. Pipes, sockets and devices are not copied.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from surefoot.errors import UsageError

MOST_COPIED_BYTES = 1 << 30
"""How many bytes are copied for each run, if blocks cannot be shared."""
MOST_ENTRIES = 20_000
"""Files and folders of a copy."""
MOST_BESIDE = 500
"""How many siblings of the working directory are linked, and how many of its parent folder."""
_LEVELS_ABOVE = 2
_CLONE = 0x40049409
"""`FICLONE`: a copy that shares its blocks until one side is written to."""
_MOST_MEASURED = 300_000
_NAMED = 3
SCRATCH = ("surefoot-bisect-", "surefoot-replay-")
"""The prefixes of the names of folders that contain copies."""


def make(source: Path, scratch: Path, leave_out: Path, share: Collection[Path] = ()) -> Path:
    """Copy `source` below `scratch`, without the folder `leave_out`; returns the path of the copy.

    Other copies are also left out, in case the working directory is the temporary folder. What is in `share` becomes a
    link. Raises `UsageError` if there is too much to copy.
    """
    above = list(source.parents)[:_LEVELS_ABOVE][::-1]
    place = scratch
    for folder, inner in zip(above, [*above, source][1:], strict=True):
        place = place / (folder.name or "root")
        place.mkdir(parents=True)
        _link_all(folder, place, leave_out=inner)
    target = place / (source.name or "work")
    target.mkdir(parents=True)
    try:
        _Shadow(source, target, leave_out, share).fill(source, target)
    except _TooMuch:
        raise UsageError(_too_much(source, leave_out, share)) from None
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UsageError(
            f"the working directory {source} cannot be copied to {scratch} ({error.strerror or error}): free space "
            "there, set TMPDIR to a folder with more space, or use --share for folders that the script only reads"
        ) from None
    return target


def shared(paths: Sequence[str | Path], source: Path) -> tuple[Path, ...]:
    """The folders and files of `--share`, validated."""
    found = []
    for given in paths:
        path = Path(os.path.abspath(source / given))
        if not path.exists():
            raise UsageError(f"--share {given}: {path} does not exist. Expected a file or folder")
        if source not in path.parents:
            raise UsageError(
                f"--share {given}: {path} is not inside the working directory {source}; paths outside it are not "
                "copied and need not be shared"
            )
        found.append(path)
    return tuple(found)


def writable(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """The folders of `--allow-writes`, validated."""
    found = [Path(os.path.realpath(path)) for path in paths]
    for given, path in zip(paths, found, strict=True):
        if not path.is_dir():
            raise UsageError(f"--allow-writes {given}: there is no folder {path}")
    return tuple(found)


def shares_blocks(folder: Path) -> bool:
    """Whether copies in a folder share their blocks with the original until they are written to."""
    one, other = (folder / f".surefoot-{os.urandom(6).hex()}" for _ in range(2))
    try:
        with open(one, "xb") as first:
            first.write(b"0" * 4096)
        with open(one, "rb") as first, open(other, "xb") as second:
            return _clone(first, second)
    except OSError:
        return False
    finally:
        for path in (one, other):
            with suppress(OSError):
                path.unlink()


class _TooMuch(Exception):
    """There is more to copy than the limit allows."""


class _Shadow:
    """Copies files and counts them."""

    def __init__(self, source: Path, target: Path, leave_out: Path, share: Collection[Path]) -> None:
        self._source, self._target = source, target
        self._real_source = os.path.realpath(source)
        self.leave_out, self.share = leave_out, frozenset(share)
        self.bytes = self.entries = 0
        self._twins: dict[tuple[int, int], Path] = {}

    def fill(self, real: Path, place: Path) -> None:
        for entry in _entries(real):
            path, made = Path(entry.path), place / entry.name
            if _is_left_out(path, self.leave_out):
                continue
            self.entries += 1
            if self.entries > MOST_ENTRIES:
                raise _TooMuch
            if path in self.share:
                _link(path, made)
            elif entry.is_symlink():
                self._symlink(path, made)
            elif entry.is_dir():
                self._folder(path, made)
            elif entry.is_file():
                with suppress(FileNotFoundError):  # removed in the meantime
                    self._file(path, made)

    def _folder(self, path: Path, made: Path) -> None:
        if _is_environment(path):
            _link(path, made)
            return
        made.mkdir()
        self.fill(path, made)

    def _symlink(self, path: Path, made: Path) -> None:
        """A link to within the working directory points to the copy. A link to a file elsewhere is replaced with a
        copy.
        """
        real = os.path.realpath(path)
        if real == self._real_source or real.startswith(self._real_source + os.sep):
            made.symlink_to(self._target / os.path.relpath(real, self._real_source))
        elif os.path.isdir(real):
            made.symlink_to(real)
        elif os.path.isfile(real):
            self._file(Path(real), made)

    def _file(self, path: Path, made: Path) -> None:
        found = path.stat()
        twin = self._twins.get((found.st_dev, found.st_ino))
        if twin is not None:
            os.link(twin, made)
            return
        if not os.access(path, os.R_OK):
            return  # the script could not read it either
        with open(path, "rb") as original, open(made, "xb") as copy:
            if not _clone(original, copy):
                self.bytes += min(found.st_size, _size_on_disk(found))
                if self.bytes > MOST_COPIED_BYTES:
                    raise _TooMuch
                _copy(original, copy, found)
        with suppress(OSError):
            shutil.copystat(path, made)
        if found.st_nlink > 1:
            self._twins[found.st_dev, found.st_ino] = made


def _is_left_out(path: Path, leave_out: Path) -> bool:
    return path == leave_out or path.name == "__pycache__" or path.name.startswith(SCRATCH)


def _is_environment(folder: Path) -> bool:
    """Whether it contains Python packages: they are found by their own paths, and training does not write to them."""
    return (folder / "pyvenv.cfg").is_file() or (folder / "conda-meta").is_dir()


def _size_on_disk(found: os.stat_result) -> int:
    return getattr(found, "st_blocks", 1 + found.st_size // 512) * 512


def _clone(original: IO[bytes], copy: IO[bytes]) -> bool:
    try:
        from fcntl import ioctl

        ioctl(copy.fileno(), _CLONE, original.fileno())
    except (ImportError, OSError):  # another file system, or one without this feature
        return False
    return True


def _copy(original: IO[bytes], copy: IO[bytes], found: os.stat_result) -> None:
    if not hasattr(os, "SEEK_DATA") or _size_on_disk(found) >= found.st_size:
        shutil.copyfileobj(original, copy, 1 << 20)
        return
    size, at = found.st_size, 0
    while at < size:
        try:
            at = os.lseek(original.fileno(), at, os.SEEK_DATA)
        except OSError:  # only a hole up to the end
            break
        end = os.lseek(original.fileno(), at, os.SEEK_HOLE)
        while at < end and (piece := os.pread(original.fileno(), min(1 << 20, end - at), at)):
            os.pwrite(copy.fileno(), piece, at)
            at += len(piece)
    os.ftruncate(copy.fileno(), size)


# ---- what there is too much of ---------------------------------------------------------------------------------------


def _too_much(source: Path, leave_out: Path, share: Collection[Path]) -> str:
    sizes = {}
    left = _MOST_MEASURED
    for entry in _entries(source):
        path = Path(entry.path)
        if _is_left_out(path, leave_out) or path in share or entry.is_symlink() or _is_environment(path):
            continue
        bytes_held, entries = _measured(path, left, leave_out, share)
        left -= entries
        sizes[entry.name] = max(bytes_held / MOST_COPIED_BYTES, entries / MOST_ENTRIES), bytes_held, entries
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:_NAMED]
    named = ", ".join(f"{name} ({_size(sizes[name][1])}, {sizes[name][2]:,} entries)" for name in largest)
    return (
        f"the working directory {source} exceeds the limit for copies, {_size(MOST_COPIED_BYTES)} "
        f"and {MOST_ENTRIES:,} entries. The largest: {named}. Exclude what the script only reads, for example --share "
        f"{largest[0] if largest else 'data'}, or move it out of the working directory"
    )


def _measured(path: Path, most_entries: int, leave_out: Path, share: Collection[Path]) -> tuple[int, int]:
    """Bytes and entries, counted up to a limit."""
    total, entries = 0, 1
    if not path.is_dir():
        with suppress(OSError):
            total = _size_on_disk(path.lstat())
        return total, entries
    for inner in _below(path, leave_out, share):
        entries += 1
        with suppress(OSError):
            found = inner.stat(follow_symlinks=False)
            total += min(found.st_size, _size_on_disk(found)) if stat.S_ISREG(found.st_mode) else 0
        if entries >= most_entries:
            break
    return total, entries


def _below(folder: Path, leave_out: Path, share: Collection[Path]) -> Iterator[os.DirEntry[str]]:
    for entry in _entries(folder):
        if not _is_left_out(Path(entry.path), leave_out) and Path(entry.path) not in share:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _below(Path(entry.path), leave_out, share)


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1024 or unit == "GB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []  # the script could not read it either


def _link_all(folder: Path, place: Path, leave_out: Path) -> None:
    for entry in _entries(folder)[:MOST_BESIDE]:
        if Path(entry.path) != leave_out:
            _link(Path(entry.path), place / entry.name)


def _link(path: Path, made: Path) -> None:
    made.symlink_to(path.resolve())
