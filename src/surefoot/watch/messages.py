"""Prints surefoot's messages to the stderr that existed when the run began.

A script may replace, close or capture `sys.stderr`; surefoot's messages must neither go there nor fail because of it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_stream: Any = sys.stderr


def stream() -> Any:
    """The stream that surefoot's messages are written to."""
    return _stream


def print_line(words: str) -> None:
    """Print a line, if the stream is still open."""
    try:
        _stream.write(words + "\n")
        _stream.flush()
    except (OSError, ValueError, AttributeError):
        pass  # the stream is closed, or there is none
