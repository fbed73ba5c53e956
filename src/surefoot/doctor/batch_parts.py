"""Which part of a batch is the target, and which contains token ids: found by comparing values, not by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.doctor.batches import leaves, map_leaves

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext
    from surefoot.doctor.function_calls import Lookup, LossInput


@dataclass(frozen=True)
class Part:
    """One tensor of every batch, by its path."""

    path: str

    def of(self, batch: Any) -> Tensor | None:
        """The tensor at this path; `None` if the batch has none."""
        return dict(leaves(batch)).get(self.path)


def target_part(context: CheckContext) -> tuple[Part, LossInput] | None:
    """The tensor that reaches the loss as its target, and the call that took it."""
    look = context.look
    for call in reversed(look.recorded.losses if look is not None else []):
        part = _part_equal_to(context.batches[0], call.target)
        if part is not None:
            return part, call
    return None


def token_parts(context: CheckContext) -> list[tuple[Part, Lookup]]:
    """The tensors that are used as indices into embeddings, as they are in the batch."""
    look = context.look
    found = []
    for lookup in look.recorded.lookups if look is not None else []:
        part = _part_equal_to(context.batches[0], lookup.ids)
        if part is not None:
            found.append((part, lookup))
    return found


def replaced(batch: Any, part: Part, new: Tensor) -> Any:
    """The same batch with another tensor as one of its parts."""
    old = dict(leaves(batch))[part.path]
    return map_leaves(batch, lambda tensor: new if tensor is old else tensor)


def _part_equal_to(batch: Any, value: Tensor) -> Part | None:
    flat = value.detach().cpu().flatten()
    for path, tensor in leaves(batch):
        if tensor.numel() == flat.numel() and torch.equal(tensor.cpu().flatten().to(flat.dtype), flat):
            return Part(path)
    return None
