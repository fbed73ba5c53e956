"""What a crash says: the innermost frames still hold the tensors the failing call was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from surefoot.observe.readable import is_readable
from surefoot.watch.nonfinite_origin import find_origin
from surefoot.watch.script_hooks import WithoutHooks
from surefoot.watch.tensor_summary import describe
from surefoot.watch.user_frames import is_users, place, traceback_frames

if TYPE_CHECKING:
    from surefoot.watch.watcher import Watcher

_CALLS = {"cross_entropy", "nll_loss", "embedding", "binary_cross_entropy", "binary_cross_entropy_with_logits",
          "one_hot", "mse_loss", "nll_loss_nd", "embedding_bag"}  # fmt: skip


def postmortem(error: BaseException, watcher: Watcher) -> dict[str, Any]:
    """Type, message and place of an error, and the tensors of the call it died in."""
    frames = list(traceback_frames(error.__traceback__))
    own = [(frame, line) for frame, line in frames if is_users(frame.f_code.co_filename)]
    facts: dict[str, Any] = {"type": type(error).__name__, "message": str(error)[:2000]}
    if own:
        frame, line = own[-1]
        facts["site"] = place(frame.f_code.co_filename, line)
        facts["function"] = frame.f_code.co_name
    with WithoutHooks():
        for frame, _ in reversed(frames):
            if frame.f_code.co_name in _CALLS and "torch" in frame.f_code.co_filename:
                facts["call"] = frame.f_code.co_name
                facts["arguments"] = _arguments(frame.f_locals)
                break
        if own and "call" not in facts:
            facts["locals"] = {
                name: describe(value)
                for name, value in list(own[-1][0].f_locals.items())[:60]
                if isinstance(value, Tensor)
            }
    return facts


def find_bad_loss(error: BaseException | None, scope: dict[str, Any] | None, watcher: Watcher) -> dict[str, Any] | None:
    """A non-finite loss that the script saw and gave up on before calling `backward`."""
    scopes = [frame.f_locals for frame, _ in traceback_frames(error.__traceback__)] if error is not None else []
    for names in [*reversed(scopes), scope or {}]:
        for name, value in list(names.items()):
            if isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None and is_readable(value):
                number = float(value.detach())
                if number != number or number in (float("inf"), float("-inf")):
                    found = find_origin(value, watcher.registry, watcher.sampler.origins, watcher.backward.data_origin)
                    return {"name": name, "value": str(number)} | found
    return None


def _arguments(scope: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("input", "target", "weight", "tensor", "indices"):
        value = scope.get(name)
        if isinstance(value, Tensor):
            found[name] = describe(value)
            if not value.is_floating_point() and value.numel() and is_readable(value):
                found[name]["negative"] = int((value < 0).sum())
    for name in ("ignore_index", "num_classes"):
        if isinstance(scope.get(name), int):
            found[name] = scope[name]
    return found
