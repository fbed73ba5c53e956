"""Describes the error that ended a script: its innermost frames still hold the tensors of the failed call."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.core.device import failure, fatal_cause, note_failure
from surefoot.core.user_code import is_users, place
from surefoot.core.without_hooks import WithoutHooks
from surefoot.keep.dead_workers import error_of_worker
from surefoot.observe.readable import is_readable
from surefoot.record.facts import CrashArguments, CrashFacts
from surefoot.watch.tensor_summary import describe
from surefoot.watch.user_frames import traceback_frames

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from surefoot.record.facts import NonFiniteLoss, TensorSummary
    from surefoot.watch.indexed_calls import IndexedCalls
    from surefoot.watch.watcher import Watcher

_CALLS = {"cross_entropy", "nll_loss", "embedding", "binary_cross_entropy", "binary_cross_entropy_with_logits",
          "one_hot", "mse_loss", "nll_loss_nd", "embedding_bag"}  # fmt: skip


def describe_end(error: BaseException | None, ranges: IndexedCalls) -> CrashFacts | None:
    """Describe the error that ended a script; `None` if there was none.

    After a device error nothing can be read from the device: the copied ranges then show which ids or labels caused it.
    If a script catches a device error and then ends normally, the error is still reported.
    """
    if error is not None:
        note_failure(error)
    failed = failure()
    if failed is None:
        return None if error is None else describe_crash(error)
    facts = CrashFacts(type=failed[0], message=failed[1][:2000]) if error is None else describe_crash(error)
    return ranges.explain(facts)


def describe_crash(error: BaseException) -> CrashFacts:
    """Type, message and place of an error, and the tensors of the call that raised it.

    After an out-of-memory error nothing is computed, because that would need memory.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return _place_of(error, list(traceback_frames(error.__traceback__)))
    frames = list(traceback_frames(error.__traceback__))
    facts = _place_of(error, frames)
    with WithoutHooks():
        for frame, _ in reversed(frames):
            if frame.f_code.co_name in _CALLS and "torch" in frame.f_code.co_filename:
                return replace(facts, call=frame.f_code.co_name, arguments=_arguments(frame.f_locals))
        own = [frame for frame, _ in frames if is_users(frame.f_code.co_filename)]
        if own:
            variables = list(own[-1].f_locals.items())[:60]
            tensors = {name: value for name, value in variables if isinstance(value, Tensor)}
            computed = [name for name, value in tensors.items() if value.grad_fn is not None]
            described = {name: describe(value) for name, value in tensors.items()}
            return replace(facts, locals=described, computed=computed)
    return facts


def _place_of(error: BaseException, frames: list[tuple[FrameType, int]]) -> CrashFacts:
    """Type and message of an error, and the innermost line of the script."""
    facts = without_frames(error)
    for frame, line in reversed(frames):
        if is_users(frame.f_code.co_filename):
            return replace(facts, site=place(frame.f_code.co_filename, line), function=frame.f_code.co_name)
    return facts


def without_frames(error: BaseException) -> CrashFacts:
    """Only the type and the message of an error.

    If it was raised from a device error, or from an error about a dead data loading worker, those of that error are
    returned.
    """
    cause = fatal_cause(error) or error_of_worker(error) or error
    return CrashFacts(type=type(cause).__name__, message=str(cause)[:2000])


def find_bad_loss(
    error: BaseException | None, scope: Mapping[str, object] | None, watcher: Watcher
) -> NonFiniteLoss | None:
    """A non-finite loss in the script's variables, if the script ended before it called `backward` on it."""
    scopes = [frame.f_locals for frame, _ in traceback_frames(error.__traceback__)] if error is not None else []
    for names in [*reversed(scopes), scope or {}]:
        for name, value in list(names.items()):
            if isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None and is_readable(value):
                number = float(value.detach())
                if number != number or number in (float("inf"), float("-inf")):
                    backward = watcher.state.backwards + 1
                    found = watcher.backward.origin_of(value, number, backward, watcher.sampler.origins)
                    return replace(found, name=name)
    return None


def _arguments(scope: Mapping[str, object]) -> CrashArguments:
    def tensor(name: str) -> TensorSummary | None:
        value = scope.get(name)
        return describe(value) if isinstance(value, Tensor) else None

    def number(name: str) -> int | None:
        value = scope.get(name)
        return value if isinstance(value, int) else None

    return CrashArguments(
        input=tensor("input"),
        target=tensor("target"),
        weight=tensor("weight"),
        tensor=tensor("tensor"),
        indices=tensor("indices"),
        ignore_index=number("ignore_index"),
    )
