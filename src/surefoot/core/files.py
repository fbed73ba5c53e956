"""Safe access to files in an untrusted folder: never writes through a link, never waits for a pipe.

A run folder can be shared. Its author may have put a link where a file is about to be written. So a file is written
under a new, unpredictable name, and renamed: a link with the same name is replaced, and its target is unchanged. The
other functions open and create only what is not a link.

A file that stays open is an `OwnedFile`. Scripts that become daemons close every descriptor above 2 (`os.closerange`),
and the next file that they open gets the same number. Writing to it, truncating it or closing it would damage a file of
the script, so the descriptor is compared with the opened file before each use. Not covered: a file that a thread opens
within the microsecond between.

The file that is rewritten repeatedly is in `record/heartbeat.py`; folders that are filled before they get their name
are in `keep/checkpoint/folders.py`. Nothing else writes into run folders.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
"""The flag for `os.open` that refuses a link."""
_PLAIN = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS | _PLAIN


def write_file(path: Path, content: str | bytes) -> None:
    """Write one file completely or not at all, replacing anything with its name. Raises `OSError`."""
    # Text may not be valid UTF-8 (an argument, a path): invalid characters become a question mark.
    data = memoryview(content.encode("utf-8", "replace") if isinstance(content, str) else content)
    # Not from `secrets`: a script may have a file with that name, which would be imported instead.
    scratch = path.with_name(f".{path.name[:100]}.{os.urandom(8).hex()}.part")
    descriptor = os.open(scratch, _NEW, 0o666)
    try:
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        finally:
            os.close(descriptor)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def read_file(path: str | Path) -> bytes:
    """The content of a plain file. Raises `OSError` for anything else: a pipe would block, a device has no end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _PLAIN)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        return file.read()


def new_file(path: Path, appending: bool = False) -> int:
    """The descriptor of a new file. Raises `FileExistsError`, also for a link."""
    return os.open(path, _NEW | (os.O_APPEND if appending else 0), 0o666)


def make_subfolder(path: Path) -> None:
    """Create a folder inside another one, if it does not exist. Raises `OSError` if a link has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotADirectoryError(
                errno.ENOTDIR, "it is a link or a file where a folder is expected; nothing is written there", str(path)
            ) from None


def append_all(descriptor: int, data: bytes | bytearray) -> None:
    """Append everything to a file, or undo what was written as far as possible."""
    size, rest = os.fstat(descriptor).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        _cut(descriptor, size, written=len(data) - len(rest))
        raise


def _cut(descriptor: int, size: int, written: int) -> None:
    """Remove what was written after `size`, unless another process has written since."""
    try:
        if os.fstat(descriptor).st_size == size + written:
            os.ftruncate(descriptor, size)
    except OSError:
        return


class OwnedFile:
    """A file that was opened here and is not a link. Raises `OSError` when its descriptor belongs to another file."""

    def __init__(self, path: str | Path, flags: int) -> None:
        self._number = os.open(path, flags | NO_LINKS | _PLAIN, 0o666)
        self._identity = _identity(os.fstat(self._number))

    @property
    def number(self) -> int:
        """The descriptor, for immediate use."""
        if self._number < 0 or _identity(os.fstat(self._number)) != self._identity:
            raise OSError(errno.EBADF, "the file was closed by other code")
        return self._number

    def is_at(self, path: str | Path) -> bool:
        """Whether a path leads to this file, and it is open."""
        try:
            return _identity(os.stat(path)) == _identity(os.fstat(self.number))
        except OSError:
            return False

    def close(self) -> None:
        """Close it, unless it is closed, or another file has its descriptor."""
        number, self._number = self._number, -1
        try:
            if number >= 0 and _identity(os.fstat(number)) == self._identity:
                os.close(number)
        except OSError:  # closed by other code
            return


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
