"""An open file that notices when its number has come to mean another.

Scripts that become daemons, or mean well, close every descriptor above 2 (`os.closerange`), and the next file they open
gets the number that was ours. To write to it, cut it or close it would be to destroy something of theirs, so the
number is compared with what was opened before each use. What a thread opens in the microsecond between is left out.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from surefoot.core.files import NO_LINKS

if TYPE_CHECKING:
    from pathlib import Path


class OwnedFile:
    """A file that was opened here, and no link, for as long as its number means it; else it raises `OSError`."""

    def __init__(self, path: Path, flags: int) -> None:
        self._number = os.open(path, flags | NO_LINKS | getattr(os, "O_BINARY", 0), 0o666)
        self._identity = _identity(self._number)

    @property
    def number(self) -> int:
        """The descriptor, to be used at once."""
        if self._number < 0 or _identity(self._number) != self._identity:
            raise OSError(errno.EBADF, "the file was closed by somebody else")
        return self._number

    def close(self) -> None:
        """Close it, unless it is closed, or another file has its number by now."""
        number, self._number = self._number, -1
        try:
            if number >= 0 and _identity(number) == self._identity:
                os.close(number)
        except OSError:  # closed by somebody else
            return


def _identity(number: int) -> tuple[int, int]:
    found = os.fstat(number)
    return found.st_dev, found.st_ino
