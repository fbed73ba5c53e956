"""Where an operation was called: the user's line, the module it runs in, and the current phase.

Everything is read from the Python stack at the time of the operation, so no hooks are needed. In backward, the stack is
cut where autograd was entered: a user's line inside it belongs to a custom function, a hook or a recomputed forward;
without one, the caller uses the forward operation instead.

A file belongs to the user if it is not part of torch, surefoot, the standard library or `site-packages`. If a program
has no such file (all code is in a package), the innermost line outside torch is used.
"""

from __future__ import annotations

import linecache
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from surefoot.core.user_code import is_users, place

if TYPE_CHECKING:
    from types import FrameType

_CALL = nn.Module._call_impl.__code__
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_SUREFOOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")
_OPTIMIZERS = os.path.join(_TORCH, "optim") + os.sep
_GRAD_SCALER = os.path.join(_TORCH, "amp", "grad_scaler.py")


class Place(NamedTuple):
    """A line of the user's."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The text of the line; empty if the source cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return place(self.file, self.line) if os.path.isabs(self.file) else f"{self.file}:{self.line}"


class Scene(NamedTuple):
    """What the stack shows about an operation."""

    place: Place | None
    """The user's line; in backward only if it is inside backward."""

    module: nn.Module | None
    """The innermost module being called."""

    recomputed: bool
    """In backward, a forward that checkpointing runs again."""

    optimizer: bool
    """Inside an optimizer of torch's."""

    scaled: bool
    """Inside `torch.amp.GradScaler`."""


@cache
def is_code_of_user(filename: str) -> bool:
    """Whether a file is the user's own."""
    if filename.startswith("<"):  # a notebook, `python -c`, `exec`; not what libraries generate
        return not filename.startswith(("<frozen", "<eval_with_key", "<__array"))
    return is_users(filename)


@cache
def _is_torch_or_ours(filename: str) -> bool:
    return filename.startswith((_TORCH, "<frozen", "<eval_with_key")) or (
        filename.startswith(_SUREFOOT) and not is_users(filename)
    )


def _is_method_of_optimizer(frame: FrameType) -> bool:
    first = frame.f_code.co_varnames[:1]
    return bool(first) and isinstance(frame.f_locals.get(first[0]), torch.optim.Optimizer)


def look(in_backward: bool) -> Scene:
    """Read the stack of the operation that is being dispatched."""
    own: FrameType | None = None
    library: FrameType | None = None
    module: nn.Module | None = None
    recomputed = optimizer = scaled = False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        filename = code.co_filename
        if code is _CALL:
            module = module or frame.f_locals.get("self")
        elif in_backward and code is _ENGINE:
            break
        elif filename == _CHECKPOINT:
            recomputed = True
        elif filename.startswith(_OPTIMIZERS):
            optimizer = optimizer or own is None or _is_method_of_optimizer(own)
        elif filename == _GRAD_SCALER:
            scaled = True
        elif own is None and is_code_of_user(filename):
            own = frame
        elif library is None and not _is_torch_or_ours(filename):
            library = frame
        if own is not None and module is not None and not in_backward:
            break
        frame = frame.f_back
    at = own or library
    spot = None if at is None else Place(at.f_code.co_filename, at.f_lineno, at.f_code.co_name)
    return Scene(spot, module, recomputed and in_backward, optimizer, scaled)
