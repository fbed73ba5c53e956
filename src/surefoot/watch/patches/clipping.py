"""Clipping of gradients: how large they were, and the limit.

Clipping by norm returns the norm. Clipping by value returns nothing, so the largest entry is read before. Clipping
written by hand is not covered: it is visible only in the gradient norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from surefoot.act import torch_clip
from surefoot.core.function_hooks import Hook
from surefoot.observe.readable import is_readable, is_result, readable
from surefoot.record.facts import ClippingFacts
from surefoot.watch.user_frames import site

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher


def wrap_clipping(watcher: Watcher, wrapping: Hooks) -> None:
    """`clip_grad_norm_` and `clip_grad_value_`."""

    def clipped(result: Any, args: Any, kwargs: Any) -> None:
        limit = kwargs.get("max_norm", args[1] if len(args) > 1 else None)
        # The norm of gradients that are sharded over ranks is sharded too: reading it would be a collective.
        norm = result.detach() if is_result(result) or is_readable(result) else None
        watcher.calls.last_clip = {
            "clip_norm": float(norm) if norm is not None and norm.device.type == "cpu" else norm,
            "clip_limit": float(limit) if limit is not None else None,
        }
        if len(watcher.calls.clips) < 3:
            held = float(limit) if limit is not None else None
            watcher.calls.clips.append(ClippingFacts(step=watcher.state.steps, site=site(4), limit=held))
        _note_if_scaled(watcher)

    def before_value(args: Any, kwargs: Any) -> None:
        """Clipping by value returns nothing, so the largest entry is computed before."""
        if watcher.probes.here():
            watcher.probes.safely("clipping", _value_clipped, watcher, args, kwargs)

    _follow_norm(watcher, wrapping, clipped)
    _follow_guard(watcher, wrapping, clipped)
    why = "the largest entry before clipping, and the limit"
    wrapping.add(nn.utils.clip_grad, "clip_grad_value_", "clipping", why, before_value, listed="parameters")


def _follow_norm(watcher: Watcher, wrapping: Hooks, clipped: Callable[..., None]) -> None:
    """Observe clipping by norm. In a sampled step, its many accesses to gradients are not recorded."""

    def before(args: Any, kwargs: Any) -> Any:
        if not watcher.probes.here():
            return None
        return args, kwargs, None if watcher.state.sampled is None else watcher.state.set_recorder_aside()

    def after(call: Any, result: Any) -> None:
        watcher.probes.safely("clipping", clipped, result, *call[:2])

    def last(call: Any) -> None:
        if call[2] is not None:
            call[2].take_up()

    why = "the norm of the gradients before clipping, and the limit"
    wrapping.add(nn.utils.clip_grad, "clip_grad_norm_", "clipping", why, before, after, last)


def _value_clipped(watcher: Watcher, args: Any, kwargs: Any) -> None:
    """Record a clipping by value that is about to happen."""
    given = args[0] if args else kwargs.get("parameters")
    limit = float(kwargs.get("clip_value", args[1] if len(args) > 1 else 0.0))
    if isinstance(given, (list, tuple, Tensor)):
        tensors = [given] if isinstance(given, Tensor) else given
        grads = [readable(t.grad.detach()) for t in tensors if t.grad is not None]
        largest = [float(grad.abs().max()) for grad in grads if grad is not None and grad.numel()]
        watcher.calls.last_clip = {
            "clip_norm": max(largest, default=0.0),
            "clip_limit": limit,
            "clip_by_value": True,
        }
    if len(watcher.calls.clips) < 3:
        watcher.calls.clips.append(ClippingFacts(step=watcher.state.steps, site=site(5), limit=limit))
    _note_if_scaled(watcher)


def _follow_guard(watcher: Watcher, wrapping: Hooks, clipped: Callable[..., None]) -> None:
    """Observe the guard's clipping inside a trainer, which clips as torch does and ignores non-finite gradients."""

    def clipped_by_guard(call: Any, result: Any) -> None:
        norm, factor = result
        if factor is not None and watcher.probes.here():
            watcher.probes.safely("clipping", clipped, norm, *call)

    hook = Hook(lambda args, kwargs: (args, kwargs), clipped_by_guard)
    wrapping.hook("clipping", torch_clip.clip_grad_norm, hook)  # not in the table of `docs/run.md`: surefoot's own


def _note_if_scaled(watcher: Watcher) -> None:
    """Count a clipping of gradients that still contain the loss scale."""
    scaler = watcher.state.scaler
    if scaler.scaled_now:
        scaler.clipped_scaled += 1
        scaler.clip_site = scaler.clip_site or site(5)
