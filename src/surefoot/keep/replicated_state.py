"""Saves state that is equal on all processes only once.

Under DDP every rank has the same parameters and the same optimizer state. The parts of all ranks but the first omit
them, and load them from the first part. Buffers are kept: BatchNorm's statistics are different on each rank until DDP's
next forward pass, and permanently with `broadcast_buffers=False`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from surefoot.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from surefoot.keep.restore import OptimizerState

AS_FIRST = "as in the part of rank 0"
"""Replaces what was left out."""


class ModelsAndOptimizer(TypedDict):
    """The parts of a checkpoint that are equal on the ranks of DDP."""

    models: list[dict[str, Tensor]]
    """`state_dict()` of each model, without its parameters if those are left out."""
    optimizer: OptimizerState | str
    """`AS_FIRST` if it is left out."""


def leave_out_copies(tree: ModelsAndOptimizer, models: Sequence[nn.Module]) -> None:
    """Keep only the buffers of the models, and nothing of the optimizer."""
    for state, model in zip(tree["models"], models, strict=True):
        for name in [name for name, _ in model.named_parameters(remove_duplicate=False) if name in state]:
            del state[name]
    tree["optimizer"] = AS_FIRST


def lacks_copies(tree: Any) -> bool:
    """Whether a loaded state needs the part of the first rank."""
    return isinstance(tree, dict) and tree.get("optimizer") == AS_FIRST


def insert_copies(tree: ModelsAndOptimizer, first: Any) -> None:
    """Insert what was left out. Raises `CheckpointError` if the first rank's part does not have it either."""
    try:
        models, own, optimizer = first["models"], tree["models"], first["optimizer"]
        if optimizer == AS_FIRST or len(models) != len(own):
            raise ValueError("it is not the first rank's")
        merged = [copy.copy(state) for state in models]
        for state, buffers in zip(merged, own, strict=True):
            state.update(buffers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            "the part of rank 0 does not contain the models and the optimizer, which this rank does not store itself: "
            f"{error}. Load another step."
        ) from error
    tree["models"], tree["optimizer"] = merged, optimizer
