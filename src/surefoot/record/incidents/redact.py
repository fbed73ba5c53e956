"""What must not leave the machine by accident: where the home is, who the user and the host are, the environment.

Free text (messages, arguments, reprs, text in a batch) goes through `Redactor` before it is written. Values of
environment variables are taken out wherever they occur, paths are reduced to the file name, and the names of user and
host are replaced. Names of parameters and modules are not free text and stay: without them nothing could be run again.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SHORTEST_VALUE = 6
"""Characters from which on the value of an environment variable is looked for: shorter ones are everyday words."""
SHORTEST_NAME = 3
_SECRET = re.compile(r"key|token|secret|passw|credential|auth|cookie|private", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?(?:[/\\]{1,2}[^\s/\\:*?\"'<>|,;()\[\]{}]+){2,}[/\\]?")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SAID = "<redacted>"


class Redactor:
    """Takes out of text what should not be in it; with `active=False` it changes nothing."""

    def __init__(self, active: bool = True) -> None:
        self._active = active
        values = [value for name, value in os.environ.items() if _worth_hiding(name, value)] if active else []
        self._values = sorted(set(values), key=len, reverse=True)
        self._names = [(re.compile(rf"(?<!\w){re.escape(name)}(?!\w)"), word) for name, word in _names()]

    def __call__(self, text: str) -> str:
        """The text without what should not be in it."""
        if not self._active:
            return text
        text = _PATH.sub(_file_name, text)
        for value in self._values:
            text = text.replace(value, _SAID)
        for pattern, word in self._names:
            text = pattern.sub(word, text)
        return _ADDRESS.sub("", text)

    def inside(self, value: Any) -> Any:
        """The same nesting with every text in it redacted; keys stay."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {key: self.inside(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.inside(item) for item in value]
        return value

    def path(self, path: str) -> str:
        """A path relative to where we are, if it lies below; else the file name."""
        if not self._active:
            return path
        with suppress(ValueError, OSError):
            return self(str(Path(path).resolve().relative_to(Path.cwd().resolve())))
        return self(Path(path).name)


def _worth_hiding(name: str, value: str) -> bool:
    if len(value) < SHORTEST_VALUE:
        return False
    return _SECRET.search(name) is not None or any(not part.isalpha() for part in value)


def _names() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    with suppress(Exception):
        found.append((str(Path.home()), "~"))
    with suppress(Exception):
        if (user := getpass.getuser()) != "root":  # nobody's name, and a common word in code
            found.append((user, "<user>"))
    with suppress(Exception):
        host = socket.gethostname()
        found += [(host, "<host>"), (host.split(".")[0], "<host>")]
    return [(name, word) for name, word in found if len(name) >= SHORTEST_NAME]


def _file_name(found: re.Match[str]) -> str:
    return re.split(r"[/\\]", found.group().rstrip("/\\"))[-1]
