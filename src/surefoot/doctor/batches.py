"""The tensors of a batch of any structure (tuples, lists, dicts, objects), and how to slice and move them.

Batches are taken from a loader without its worker processes, and positions are restored where possible: samplers draw
from generators that the caller restores, and a loader with `state_dict` gets its state back. An iterator cannot be
rewound; as few batches as possible are taken from it, and a note says how many.

The target and the token ids of a batch are found by comparing values, not by position.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from surefoot.core import nested

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext
    from surefoot.doctor.function_calls import Lookup, LossInput

MOST_BATCHES = 32
MOST_ROWS = 4096
MOST_BYTES = 256 * 2**20
FROM_AN_ITERATOR = 4


def leaves(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a batch with its path, such as `[0]` or `['labels']`."""
    return ((path or "batch", tensor) for path, tensor in nested.named_leaves(batch))


def map_leaves(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same batch with every tensor changed and numeric arrays converted to tensors; everything else stays."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return change(torch.as_tensor(leaf)) if leaf.dtype.kind in "fiub" else leaf
        return change(leaf)

    return nested.map_leaves(batch, changed, (Tensor, np.ndarray))


def to_device(batch: Any, device: torch.device) -> Any:
    """A copy of the batch on a device, through its own `.to` if it is an object of another library."""
    with suppress(Exception):
        if not isinstance(batch, Tensor | Mapping | tuple | list) and hasattr(batch, "to"):
            return copy.copy(batch).to(device)
    return map_leaves(batch, lambda tensor: tensor.detach().to(device, copy=True))


def row_count(batch: Any) -> int | None:
    """The number of rows of a batch; `None` if its tensors disagree."""
    sizes = {tensor.shape[0] for _, tensor in leaves(batch) if tensor.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None


def first_rows(batch: Any, rows: int) -> Any:
    """The first rows of a batch; the whole batch if its tensors disagree about the number of rows."""
    count = row_count(batch)
    if count is None or count <= rows:
        return batch
    return map_leaves(batch, lambda tensor: tensor[:rows] if tensor.dim() else tensor)


def byte_count(batch: Any) -> int:
    """The memory of the tensors of a batch."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in leaves(batch))


def is_iterator(loader: Any) -> bool:
    """Whether taking a batch from it advances it permanently."""
    return hasattr(loader, "__next__") and iter(loader) is loader


def take(loader: Iterable[Any], most: int = MOST_BATCHES) -> list[Any]:
    """A few batches on the host, limited in rows and memory. A loader with state gets its state back."""
    batches: list[Any] = []
    rows = size = 0
    with _position_kept(loader):
        source: Iterable[Any] = _without_workers(loader)
        if isinstance(source, Tensor | Mapping | str):
            raise TypeError(f"`loader` must be iterable over batches; got a {type(source).__name__}")
        for batch in islice(iter(source), FROM_AN_ITERATOR if is_iterator(loader) else most):
            batches.append(map_leaves(batch, lambda tensor: tensor.detach().clone()))
            rows += row_count(batches[-1]) or 1
            size += byte_count(batches[-1])
            if rows >= MOST_ROWS or size >= MOST_BYTES:
                break
    return batches


def _without_workers(loader: Any) -> Any:
    """The same batches loaded in this process: no workers are started, and the user's are not used."""
    if type(loader) is not DataLoader or loader.num_workers == 0:
        return loader
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=loader.sampler, collate_fn=loader.collate_fn)
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return DataLoader(
            loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, collate_fn=loader.collate_fn
        )
    return DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn, generator=loader.generator
    )


@contextmanager
def _position_kept(loader: Any) -> Iterator[None]:
    """Restore the position of a loader that stores it (`state_dict`)."""
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        yield
        return
    state = copy.deepcopy(loader.state_dict())
    try:
        yield
    finally:
        loader.load_state_dict(state)


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
