"""An open file that detects when its descriptor belongs to another file.

Scripts that become daemons close every descriptor above 2 (`os.closerange`), and the next file that they open gets the
same number. Writing to it, truncating it or closing it would damage a file of the script, so the descriptor is compared
with the opened file before each use. Not covered: a file that a thread opens within the microsecond between.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from surefoot.core.files import NO_LINKS

if TYPE_CHECKING:
    from pathlib import Path


class OwnedFile:
    """A file that was opened here and is not a link. Raises `OSError` when its descriptor belongs to another file."""

    def __init__(self, path: Path, flags: int) -> None:
        self._number = os.open(path, flags | NO_LINKS | getattr(os, "O_BINARY", 0), 0o666)
        self._identity = _identity(self._number)

    @property
    def number(self) -> int:
        """The descriptor, for immediate use."""
        if self._number < 0 or _identity(self._number) != self._identity:
            raise OSError(errno.EBADF, "the file was closed by other code")
        return self._number

    def close(self) -> None:
        """Close it, unless it is closed, or another file has its descriptor."""
        number, self._number = self._number, -1
        try:
            if number >= 0 and _identity(number) == self._identity:
                os.close(number)
        except OSError:  # closed by other code
            return


def _identity(number: int) -> tuple[int, int]:
    found = os.fstat(number)
    return found.st_dev, found.st_ino
