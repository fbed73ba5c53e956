"""The user's own file and line: the innermost frame that belongs neither to torch nor to a library nor to surefoot."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from surefoot.core.user_code import HERE, PACKAGES, is_users, place, users_frame, variables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

_WATCHING = tuple(
    os.path.join(HERE, name) + os.sep for name in ("watch", "observe", "core", os.path.join("experiments", "changes"))
)
_WRAPPERS = tuple(
    os.path.join("torch", *part)
    for part in (("_compile.py",), ("_dynamo", "eval_frame.py"), ("utils", "_contextlib.py"))
)


def user_frame(depth: int = 1) -> FrameType | None:
    """The innermost frame of the user's code."""
    return users_frame(sys._getframe(depth))


def caller() -> FrameType | None:
    """The frame that called the observed function.

    Wrappers of torch are skipped: importing `torch._dynamo` puts one around some functions.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_WATCHING):
        frame = frame.f_back
    if frame is not None and not is_users(frame.f_code.co_filename) and not is_library(frame.f_code.co_filename):
        frame = frame.f_back  # the function itself
    while frame is not None and (frame.f_code.co_filename.endswith(_WRAPPERS) or _is_text(frame.f_code.co_filename)):
        frame = frame.f_back  # what `exec` runs belongs to whoever called it
    return frame


def _is_text(filename: str) -> bool:
    """Whether code comes from a string: `<string>`, or another name in angle brackets that is nobody's file."""
    return filename.startswith("<") and not filename.startswith("<frozen") and not is_users(filename)


def is_library(filename: str) -> bool:
    """Whether a file belongs to a library other than Python, torch and NumPy; this one counts."""
    if is_users(filename) or filename.startswith("<"):
        return False
    packaged = any(folder in filename for folder in PACKAGES)
    inside = any(f"{folder}{os.sep}{name}{os.sep}" in filename for folder in PACKAGES for name in ("torch", "numpy"))
    return (packaged and not inside) or filename.startswith(HERE + os.sep)


def is_other_library(filename: str) -> bool:
    """Whether a file belongs to a library other than Python, torch, NumPy and this one."""
    return is_library(filename) and not filename.startswith(HERE + os.sep)


_TRAINERS = {
    os.path.join(os.sep, "transformers", ""): "transformers",
    os.path.join(os.sep, "trl", ""): "transformers",  # its trainers are derived from those of transformers
    os.path.join(os.sep, "lightning", "pytorch", ""): "lightning",
    os.path.join(os.sep, "pytorch_lightning", ""): "lightning",
    os.path.join(os.sep, "accelerate", ""): "accelerate",
}
"""Folders of libraries below the folder of all packages, and the library whose settings their loops have."""


def trainer_of(frame: FrameType | None) -> str | None:
    """The library whose training loop is running: the outermost known one, as trainers call each other."""
    found = None
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_other_library(filename):
            packages = next(folder for folder in PACKAGES if folder in filename)
            inside = os.sep + filename.rpartition(packages + os.sep)[2]
            found = next((name for folder, name in _TRAINERS.items() if inside.startswith(folder)), found)
        frame = frame.f_back
    return found


def site(depth: int = 1) -> str:
    """The current position in the user's code, such as `train.py:14`; empty if no frame is the user's."""
    frame = user_frame(depth + 1)
    return "" if frame is None else place(frame.f_code.co_filename, frame.f_lineno)


def traceback_frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames of a traceback, each with its line, outermost first."""
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def name_of(value: object, frame: FrameType | None) -> str:
    """The name of the variable, of the frame or its module, that holds an object."""
    while frame is not None:
        for scope in (variables(frame), frame.f_globals):
            for name, held in list(scope.items()):
                if held is value and not name.startswith("_"):
                    return name
        frame = frame.f_back if frame.f_back is not None and is_users(frame.f_back.f_code.co_filename) else None
    return ""
