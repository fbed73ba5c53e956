"""A traceback without surefoot's entries.

In a sampled step, a call may pass through the recorder (`torch/overrides.py` and `function_recorder.py`) and through
the branch of `nn.Module.__call__` for hooks. Those entries are removed, or moved to the line of the ordinary branch.
"""

from __future__ import annotations

import dis
import os
from types import TracebackType
from typing import TYPE_CHECKING

from torch import nn

from surefoot.core.operations import call_as_caller

if TYPE_CHECKING:
    from types import CodeType

_WATCH = os.path.dirname(os.path.abspath(__file__))
_SUREFOOT = os.path.dirname(_WATCH)
_OURS = (
    _WATCH + os.sep,
    os.path.join(_SUREFOOT, "experiments", "changes") + os.sep,
    os.path.join(_SUREFOOT, "guard", "step_hooks.py"),
    os.path.join(_SUREFOOT, "guard", "guarded_optimizer.py"),
)
_OVERRIDES = os.path.join("torch", "overrides.py")
_CALL: CodeType = nn.Module._call_impl.__code__


def without_watching(trace: TracebackType) -> TracebackType:
    """The traceback without surefoot's entries; unchanged if they cannot be removed."""
    entries: list[TracebackType] = []
    at: TracebackType | None = trace
    while at is not None:
        entries.append(at)
        at = at.tb_next
    kept: list[TracebackType] = []
    for position, entry in enumerate(entries):
        if not _is_surefoots(entry):
            kept.append(entry)
            continue
        if not kept or not kept[-1].tb_frame.f_code.co_filename.endswith(_OVERRIDES):
            continue
        kept.pop()
        following = next((e for e in entries[position + 1 :] if not _is_surefoots(e)), None)
        if following is not None and kept and kept[-1].tb_frame.f_code is following.tb_frame.f_code:
            kept.pop()  # the function dispatched to the recorder, which called it again
    return _linked(_without_hook_branch(kept)) or trace


def _is_surefoots(entry: TracebackType) -> bool:
    code = entry.tb_frame.f_code
    return code.co_filename.startswith(_OURS) or code.co_name == call_as_caller.__name__


def _without_hook_branch(entries: list[TracebackType]) -> list[TracebackType]:
    direct = _direct_call()
    kept: list[TracebackType] = []
    skip = False
    for entry, following in zip(entries, [*entries[1:], None], strict=True):
        if skip:
            skip = False
            continue
        code = entry.tb_frame.f_code
        inner = following is not None and following.tb_frame.f_code in _CALL.co_consts
        if code is _CALL and inner and direct is not None:
            entry = TracebackType(None, entry.tb_frame, *direct)
            skip = True
        kept.append(entry)
    return kept


def _direct_call() -> tuple[int, int] | None:
    """Instruction and line of `return forward_call(...)`, at its first occurrence in the function."""
    line = called = None
    for step in dis.get_instructions(_CALL):
        if step.starts_line is not None and not isinstance(step.starts_line, bool):
            line = step.starts_line
        line = getattr(step, "line_number", None) or line
        if step.argval == "forward_call" and step.opname.startswith("LOAD"):
            called = line
        if called is not None and line is not None and step.opname.startswith("CALL") and line == called:
            return step.offset, line
    return None


def _linked(entries: list[TracebackType]) -> TracebackType | None:
    following: TracebackType | None = None
    for entry in reversed(entries):
        following = TracebackType(following, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return following
