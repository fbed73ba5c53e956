"""The parts of one step as one state, for a run that may have another number of processes or another mesh.

`tree(rank)` is the state that one rank saved. A tensor that was sharded is a `SavedShards`, which finds the shards in
all files and reads any part of the tensor. A process that needs only what it saved itself opens only its own part;
other parts are opened when one of their values is needed, and only that value is read.

A process alone verifies every part. Processes that agree afterwards on whether all could load the step (`selection.py`)
share the work: each part is verified by one of them.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from surefoot.errors import CheckpointError
from surefoot.keep.checkpoint.manifest import STATE, TENSORS, SaveFacts, read_manifest, verify
from surefoot.keep.checkpoint.plain import Marked, as_noted, read_dtype, tensors_by_path, unflatten
from surefoot.keep.checkpoint.shards import SavedShard, SavedShards, ShardLayout, read_layout
from surefoot.keep.checkpoint.storage import TensorFile, fault_of, read_contents
from surefoot.keep.replicated_state import insert_copies, lacks_copies

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from surefoot.keep.checkpoint.listing import CheckpointListing


class OpenedPart:
    """The part of one rank. Its tensors are not read yet."""

    def __init__(self, rank: int, folder: Path) -> None:
        """Open a part. Raises `CheckpointError`."""
        self.rank, self.folder = rank, folder
        contents = read_contents(folder, read_manifest(folder), TensorFile(folder / TENSORS))
        self.plain, self.tensors = contents.plain, contents.tensors
        self.facts: SaveFacts = contents.facts

    @cached_property
    def shards(self) -> dict[str, tuple[Marked, SavedShard]]:
        """Its shards of sharded tensors, by their path in the state."""
        with fault_of(self.folder / STATE):
            return {
                path: (marked, SavedShard(self.rank, read_layout(marked["shard"]), partial(self._read, marked)))
                for path, marked in tensors_by_path(self.plain)
                if "shard" in marked
            }

    def _read(self, marked: Marked, at: tuple[slice, ...]) -> Tensor:
        """Read a part of a shard."""
        name, kind = str(marked["name"]), marked.get("as")
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder.name}/{STATE}: it names a tensor {name!r:.80} that is not there.")
        if kind is None and isinstance(self.tensors, TensorFile):
            return self.tensors.part(name, at)
        return as_noted(self.tensors[name], kind, marked.get("shape"))[at]


class SavedParts:
    """All parts of one step."""

    def __init__(self, listing: CheckpointListing, rank: int, world_size: int, shares_verifying: bool = False) -> None:
        """Verify the parts for the process `rank` of `world_size`. Raises `CheckpointError`."""
        self._listing, self._rank, self._opened = listing, rank, dict[int, OpenedPart]()
        self.count = len(listing.paths)
        """The number of processes that saved it."""
        self.same_ranks = self.count == world_size
        """Whether the number of processes is the same now."""
        self.base = rank % self.count
        """The rank whose part this process continues from."""
        for each, path in sorted(listing.paths.items()):
            if not shares_verifying or each % world_size == rank:
                verify(path)
        self._check_version()

    @property
    def facts(self) -> SaveFacts:
        """The facts of the part that this process continues from."""
        return self._part(self.base).facts

    @property
    def is_new_rank(self) -> bool:
        """Whether no part was saved by this rank."""
        return self._rank >= self.count

    def tree(self, rank: int) -> Any:
        """The state that one rank saved, completed with what only the part of rank 0 contains."""
        part = self._part(rank)
        paths = {id(marked): path for path, (marked, _) in part.shards.items()}
        with fault_of(part.folder / STATE):
            tree = unflatten(part.plain, part.tensors, lambda marked: self._spread(part, marked, paths[id(marked)]))
        if rank and lacks_copies(tree):
            insert_copies(tree, self.tree(0))
        return tree

    def entries(self, name: str) -> list[Any]:
        """One entry of the state that each rank saved, such as its random streams."""
        found = [self._part(rank) for rank in sorted(self._listing.paths)]
        known = [isinstance(part.plain, dict) and name in part.plain for part in found]
        return [unflatten(p.plain[name], p.tensors) if there else None for p, there in zip(found, known, strict=True)]

    def _part(self, rank: int) -> OpenedPart:
        if rank not in self._opened:
            self._opened[rank] = OpenedPart(rank, self._listing.paths[rank])
        return self._opened[rank]

    def _spread(self, part: OpenedPart, marked: Marked, path: str) -> SavedShards:
        shard: Any = marked["shard"]
        own = part.shards[path][1] if self.same_ranks and part.rank == self._rank else None
        dtype = read_dtype(shard.get("dtype"))
        return SavedShards(path, read_layout(shard).shape, dtype, partial(self._shards_at, path), own)

    def _shards_at(self, path: str) -> list[SavedShard]:
        """The shards of one tensor in all parts, without duplicates."""
        found: dict[ShardLayout, SavedShard] = {}
        for rank in sorted(self._listing.paths):
            held = self._part(rank).shards.get(path)
            if held is not None:
                found.setdefault(held[1].layout, held[1])
        return list(found.values())

    def _check_version(self) -> None:
        """Refuse version 1 with several processes: it did not store which part of a tensor a shard is."""
        old = any(manifest.schema < 2 for manifest in self._listing.manifests.values())
        if not old or self.same_ranks or self.count == 1:
            return
        replicated = all(lacks_copies(self._part(rank).plain) for rank in self._listing.paths if rank)
        if not replicated:
            raise CheckpointError(
                f"{self._listing.paths[0].name}: it was saved by {self.count} processes with a version of surefoot "
                f"that did not store how tensors are divided. Start {self.count} processes once and save; any number "
                "of processes can load that checkpoint."
            )
