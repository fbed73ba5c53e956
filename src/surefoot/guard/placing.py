"""Assembles the state that this process needs from the parts that all processes saved.

`keep/resharding.py` places single values; this module matches each value of a run with its live tensor.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from surefoot.core.random_state import read_streams
from surefoot.errors import CheckpointError
from surefoot.guard.run_state import is_stabilizer, run_state_of
from surefoot.keep.checkpoint.shards import whole_tensors
from surefoot.keep.resharding import placed_like, placed_model, placed_optimizer, streams_for_new_rank

if TYPE_CHECKING:
    from surefoot.guard.run_state import RunState
    from surefoot.keep.checkpoint.parts import SavedParts


def placed_parts(run_state: RunState, parts: SavedParts) -> Any:
    """The state that this process needs from the parts that all processes saved. Raises `CheckpointError`."""
    tree = parts.tree(parts.base)
    if not isinstance(tree, dict):
        return whole_tensors(tree)
    if not parts.same_ranks and _is_inside_window(tree):
        raise CheckpointError(
            f"the checkpoint was saved by {parts.count} process(es) in the middle of an accumulation window, and each "
            "process has its own gradients. Start the same number of processes, or load a step that was saved between "
            "two windows."
        )
    if parts.is_new_rank:
        tree["streams"] = streams_for_new_rank(parts) or read_streams()
    return _placed_tree(run_state, tree)


def _placed_tree(run_state: RunState, tree: dict[str, Any]) -> dict[str, Any]:
    """The same for a state in which tensors that were sharded over processes are `SavedShards`."""
    parts, found = run_state.parts, dict(tree)
    with suppress(KeyError, TypeError, ValueError):  # `RunState.faults` reports what is wrong with it
        models = zip(parts.models, tree["models"], strict=True)
        found["models"] = [placed_model(model, saved) for model, saved in models]
        found["optimizer"] = placed_optimizer(parts.optimizer, tree["optimizer"])
        found["also"] = {name: _placed_part(parts.also.get(name), saved) for name, saved in tree["also"].items()}
    return {name: placed_like(value, None) for name, value in found.items()}


def _placed_part(thing: Any, saved: Any) -> Any:
    if is_stabilizer(thing) and isinstance(saved, dict):
        return _placed_tree(run_state_of(thing), saved)
    if isinstance(thing, torch.optim.Optimizer):
        return placed_optimizer(thing, saved)
    return placed_model(thing, saved) if isinstance(thing, torch.nn.Module) else placed_like(saved, None)


def _is_inside_window(tree: dict[str, Any]) -> bool:
    """Whether a state contains gradients of an incomplete window."""
    own = tree.get("stabilizer")
    window = own.get("window") if isinstance(own, dict) else None
    return isinstance(window, dict) and window.get("sums") is not None
