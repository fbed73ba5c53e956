"""The positions of the threads of this process, read from another thread: the user's line, and the call it waits in.

Only names and line numbers are read from a frame, never its variables. Walking a stack takes some ten microseconds, far
less than the interval after which the interpreter switches threads, so that no frame lives longer than its function.

Not covered: the inside of a C function. A call into a library appears as the Python line that made it.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.core.user_code import is_users, place

if TYPE_CHECKING:
    from types import FrameType

_DISTRIBUTED = os.path.join("torch", "distributed", "")
_WRAPPER = os.path.join("torch", "nn", "parallel", "distributed.py")
_BACKWARD = os.path.join("torch", "autograd", "")
_IN_BETWEEN = ("wrapper", "inner", "_wrapper")
"""Decorators around torch's collectives."""
_DEBUGGERS = tuple(
    os.sep + name for name in ("pdb.py", "bdb.py", "pydevd.py", os.path.join("pydevd_bundle", "pydevd_frame.py"))
)
_MOST_FRAMES = 500


@dataclass(frozen=True)
class Position:
    """The position of one thread."""

    exact: tuple[tuple[int, int], ...]
    """For each of its frames, the code and the current instruction."""
    functions: tuple[int, ...]
    """The functions of the user among them."""
    where: str = ""
    """The innermost line of the user, such as `train.py:33`."""
    function: str = ""
    """The name of its function."""
    waits_in: str = ""
    """The call below that line in which one rank waits for others, such as `torch.distributed.barrier`, or empty."""
    in_debugger: bool = False


def position_of(thread: int) -> Position | None:
    """The current position of a thread; `None` if it has ended."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    frames: list[tuple[str, str, int, int, int]] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        frames.append((code.co_filename, code.co_name, frame.f_lineno or code.co_firstlineno, id(code), frame.f_lasti))
        frame = frame.f_back
    own = next((number for number, each in enumerate(frames) if is_users(each[0])), None)
    below = frames if own is None else frames[:own]
    return Position(
        exact=tuple((code, at) for _, _, _, code, at in frames),
        functions=tuple(code for filename, _, _, code, _ in frames if is_users(filename)),
        where="" if own is None else place(frames[own][0], frames[own][2]),
        function="" if own is None else frames[own][1],
        waits_in=_waits_in([(filename, name) for filename, name, _, _, _ in below]),
        in_debugger=any(filename.endswith(_DEBUGGERS) for filename, _, _, _, _ in below),
    )


def _waits_in(below: list[tuple[str, str]]) -> str:
    """The outermost call of torch in which ranks wait for each other."""
    for filename, name in reversed(below):
        if _DISTRIBUTED in filename and name not in _IN_BETWEEN:
            return f"torch.distributed.{name}"
        if filename.endswith(_WRAPPER):
            return f"DistributedDataParallel.{name}"
        if _BACKWARD in filename and name in ("backward", "grad"):
            return f"torch.autograd.{name}"
    return ""


def stacks_of_all() -> str:
    """The stacks of all other threads, in the format of tracebacks, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    held = {ident: _lines(frame) for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    parts = []
    for ident in sorted(held, key=lambda each: (each != main, each)):
        name = names.get(ident, "not a thread of Python's own")
        parts.append("\n".join([f"Thread {name} (most recent call last):", *map(_shown, held[ident])]))
    return "\n\n".join(parts) + "\n"


def _lines(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """File, line and function of each frame, the outermost first."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_name))
        frame = frame.f_back
    return found[::-1]


def _shown(line: tuple[str, int, str]) -> str:
    filename, number, function = line
    text = linecache.getline(filename, number).strip()
    return f'  File "{filename}", line {number}, in {function}' + (f"\n    {text}" if text else "")
