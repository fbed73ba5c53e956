"""Tensors that are sharded over processes: which part each one holds, and how any other part is read from files.

A DTensor is divided along some of its dimensions. `layout_of` returns the indices of the whole tensor that this process
holds, as ranges per dimension. Torch itself does the division: its placements are applied to the numbers 0, 1, 2, …, so
that uneven shards and the interleaved ones of FSDP2 on top of tensor parallelism are as torch makes them. Each part of
a checkpoint stores these ranges with its tensors. `SavedShards` is a tensor in a checkpoint whose parts are in several
files: it reads the part that a process needs now, for any number of processes and any mesh at the save.

Not covered: DTensors with partial sums (a parameter is never one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from surefoot.core import nested
from surefoot.errors import CheckpointError, UsageError

Range = tuple[int, int]
"""The first index, and the index after the last one."""


class LayoutEntry(TypedDict):
    """The stored form of a layout."""

    shape: list[int]
    ranges: list[list[list[int]]]


class ShardLayout(NamedTuple):
    """The part of a whole tensor that one process holds."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    ranges: tuple[tuple[Range, ...], ...]
    """For each dimension, the indices that are held, in their order in the shard."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(sum(stop - start for start, stop in each) for each in self.ranges)

    def stored(self) -> LayoutEntry:
        """The stored form."""
        return {"shape": list(self.shape), "ranges": [[list(each) for each in ranges] for ranges in self.ranges]}


def whole_layout(shape: Sequence[int]) -> ShardLayout:
    """The layout of a process that holds everything."""
    return ShardLayout(tuple(shape), tuple(((0, size),) if size else () for size in shape))


def read_layout(entry: Any) -> ShardLayout:
    """A stored layout. Raises `CheckpointError` if it is invalid."""
    try:
        shape = tuple(_index(size) for size in entry["shape"])
        ranges = tuple(tuple((_index(start), _index(stop)) for start, stop in each) for each in entry["ranges"])
        fits = len(shape) == len(ranges) and all(
            0 <= start < stop <= size for size, each in zip(shape, ranges, strict=True) for start, stop in each
        )
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"the state holds an invalid layout of shards: {entry!r:.80}.") from error
    if not fits:
        raise CheckpointError(f"the state holds an invalid layout of shards: {entry!r:.80}.")
    return ShardLayout(shape, ranges)


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not an index")
    return value


# ---- live tensors -------------------------------------------------------------------------------------------------


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


class Spread(NamedTuple):
    """How a DTensor is sharded, without the tensor: enough to compute the layout later."""

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placements: tuple[Any, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    """The coordinates of this process in the mesh; `None` if it is not part of it."""

    def layout(self) -> ShardLayout:
        """The part that this process holds. Raises `UsageError` for partial sums and for divisions unlike torch's."""
        if self.coordinate is None:
            return ShardLayout(self.shape, tuple(() for _ in self.shape))
        found = _layout(self.shape, self.placements, self.mesh, self.coordinate)
        if found.local_shape != self.local_shape:
            raise UsageError(
                f"a DTensor of shape {self.shape} with the placements {self.placements} should have shape "
                f"{found.local_shape} here and has {self.local_shape}: it was divided in another way than torch does, "
                "and cannot be assembled again. Save its `full_tensor()`, or create it with `distribute_tensor`."
            )
        return found


def spread_of(tensor: Any) -> Spread:
    """How a DTensor is sharded."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    place = None if coordinate is None else tuple(coordinate)
    local = tuple(tensor._local_tensor.shape)
    return Spread(tuple(tensor.shape), local, tuple(tensor.placements), tuple(mesh.shape), place)


def layout_of(tensor: Any) -> ShardLayout:
    """The part of a DTensor that this process holds."""
    return spread_of(tensor).layout()


@lru_cache(maxsize=100_000)
def _layout(
    shape: tuple[int, ...], placements: tuple[Any, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...]
) -> ShardLayout:
    """The layout at one coordinate of a mesh: torch's own division, applied to the indices of each dimension."""
    indices = [torch.arange(size) for size in shape]
    for placement, count, place in zip(placements, mesh, coordinate, strict=True):
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise UsageError(
                f"a DTensor with the placement {placement} has no value of its own on any process, so its shards "
                "cannot be saved. Save its `full_tensor()`."
            )
        # FSDP2 on top of tensor parallelism divides every piece of the latter: the division along the outer dimension
        # of the mesh is made in as many pieces, and takes its share of each.
        pieces = _split(indices[placement.dim], int(getattr(placement, "split_factor", 1)))
        indices[placement.dim] = torch.cat([_split(piece, count)[place] for piece in pieces])
    return ShardLayout(shape, tuple(_ranges(each.tolist()) for each in indices))


def _split(indices: Tensor, count: int) -> list[Tensor]:
    """The indices in this many parts, the last of which may be empty, as torch splits a shard."""
    from torch.distributed.tensor import Shard

    return Shard(0)._split_tensor(indices, count, with_padding=False, contiguous=True)[0]


def _ranges(indices: list[int]) -> tuple[Range, ...]:
    found: list[Range] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return tuple(found)


def cut(whole: Tensor, layout: ShardLayout) -> Tensor:
    """The part of a whole tensor that a layout names, as a copy."""
    part = torch.empty(layout.local_shape, dtype=whole.dtype, device=whole.device)
    _copy(part, layout, whole_layout(whole.shape), lambda at: whole[at])
    return part


# ---- files --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedShard:
    """The part of a tensor in one file."""

    rank: int
    layout: ShardLayout
    read: Callable[[tuple[slice, ...]], Tensor]
    """Reads a part of it."""


@dataclass(frozen=True)
class SavedShards:
    """A tensor whose parts are in several files."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: Callable[[], Sequence[SavedShard]]
    """Finds the shards, without duplicates."""
    own: SavedShard | None
    """The shard of the process with the same rank, if the number of processes was the same."""

    def part(self, layout: ShardLayout) -> Tensor:
        """The values that a layout names. Raises `CheckpointError` unless the files contain each of them once."""
        if self.own is not None and self.own.layout == layout:
            return self.own_part()
        part = torch.empty(layout.local_shape, dtype=self.dtype)
        found = sum(_copy(part, layout, shard.layout, shard.read) for shard in self.shards())
        if found != part.numel():
            raise CheckpointError(
                f"the parts of the checkpoint hold {found:,} of the {part.numel():,} values that this process needs of "
                f"{self.name!r}: they are not all of one save."
            )
        return part

    def whole(self) -> Tensor:
        """All values."""
        return self.part(whole_layout(self.shape))

    def own_part(self) -> Tensor:
        """The values that the process with the same rank held."""
        assert self.own is not None
        shape = self.own.layout.local_shape
        part = torch.empty(shape, dtype=self.dtype)
        if part.numel():
            part = _checked(self.own.read(tuple(slice(0, size) for size in shape)), part)
        return part


def whole_tensors(tree: Any, change: Callable[[SavedShards], Any] = SavedShards.whole) -> Any:
    """A loaded state with every tensor complete, or replaced by the result of `change`."""
    return nested.map_leaves(tree, change, SavedShards)


def _copy(target: Tensor, wanted: ShardLayout, held: ShardLayout, read: Callable[[tuple[slice, ...]], Tensor]) -> int:
    """Copy the wanted values that a shard holds; returns their number."""
    if wanted.shape != held.shape:
        raise CheckpointError(f"a saved tensor has shape {held.shape} where {wanted.shape} is expected.")
    copied = 0
    overlaps = [list(_overlaps(one, other)) for one, other in zip(wanted.ranges, held.ranges, strict=True)]
    for pieces in product(*overlaps):
        place = target[tuple(here for here, _ in pieces)]
        place.copy_(_checked(read(tuple(there for _, there in pieces)), place))
        copied += prod(here.stop - here.start for here, _ in pieces)
    return copied


def _checked(found: Tensor, expected: Tensor) -> Tensor:
    """The tensor that was read, if it matches its layout."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise CheckpointError(
            f"a shard in the checkpoint is {found.dtype} of shape {tuple(found.shape)} where its layout says "
            f"{expected.dtype} of shape {tuple(expected.shape)}."
        )
    return found


def _overlaps(wanted: Sequence[Range], held: Sequence[Range]) -> Iterator[tuple[slice, slice]]:
    """The positions of common indices in two shards, along one dimension."""
    here = 0
    for start, stop in wanted:
        there = 0
        for first, last in held:
            low, high = max(start, first), min(stop, last)
            if low < high:
                size = high - low
                yield (
                    slice(here + low - start, here + low - start + size),
                    slice(there + low - first, there + low - first + size),
                )
            there += last - first
        here += stop - start
