"""Describes the error that ended a script: its innermost frames still hold the tensors of the call that failed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from surefoot.observe.readable import is_readable
from surefoot.record.facts import CrashArguments, CrashFacts
from surefoot.watch.nonfinite_origin import find_origin
from surefoot.watch.script_hooks import WithoutHooks
from surefoot.watch.tensor_summary import describe
from surefoot.watch.user_frames import is_users, place, traceback_frames

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surefoot.record.facts import NonFiniteLoss, TensorSummary
    from surefoot.watch.watcher import Watcher

_CALLS = {"cross_entropy", "nll_loss", "embedding", "binary_cross_entropy", "binary_cross_entropy_with_logits",
          "one_hot", "mse_loss", "nll_loss_nd", "embedding_bag"}  # fmt: skip


def describe_crash(error: BaseException) -> CrashFacts:
    """Type, message and place of an error, and the tensors of the call it died in."""
    frames = list(traceback_frames(error.__traceback__))
    own = [(frame, line) for frame, line in frames if is_users(frame.f_code.co_filename)]
    facts = without_frames(error)
    if own:
        frame, line = own[-1]
        facts = replace(facts, site=place(frame.f_code.co_filename, line), function=frame.f_code.co_name)
    with WithoutHooks():
        for frame, _ in reversed(frames):
            if frame.f_code.co_name in _CALLS and "torch" in frame.f_code.co_filename:
                return replace(facts, call=frame.f_code.co_name, arguments=_arguments(frame.f_locals))
        if own:
            variables = list(own[-1][0].f_locals.items())[:60]
            tensors = {name: describe(value) for name, value in variables if isinstance(value, Tensor)}
            return replace(facts, locals=tensors)
    return facts


def without_frames(error: BaseException) -> CrashFacts:
    """Only the type and the message of an error."""
    return CrashFacts(type=type(error).__name__, message=str(error)[:2000])


def find_bad_loss(
    error: BaseException | None, scope: Mapping[str, object] | None, watcher: Watcher
) -> NonFiniteLoss | None:
    """A non-finite loss that the script saw and gave up on before calling `backward`."""
    scopes = [frame.f_locals for frame, _ in traceback_frames(error.__traceback__)] if error is not None else []
    for names in [*reversed(scopes), scope or {}]:
        for name, value in list(names.items()):
            if isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None and is_readable(value):
                number = float(value.detach())
                if number != number or number in (float("inf"), float("-inf")):
                    origins, follow = watcher.sampler.origins, watcher.backward.data_origin
                    return replace(find_origin(value, number, watcher.registry, origins, follow), name=name)
    return None


def _arguments(scope: Mapping[str, object]) -> CrashArguments:
    def tensor(name: str) -> TensorSummary | None:
        value = scope.get(name)
        return _argument(value) if isinstance(value, Tensor) else None

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
        num_classes=number("num_classes"),
    )


def _argument(value: Tensor) -> TensorSummary:
    facts = describe(value)
    if value.is_floating_point() or not value.numel() or not is_readable(value):
        return facts
    return replace(facts, negative=int((value < 0).sum()))
