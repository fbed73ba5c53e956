"""Parts of several ranks, written here by one process: what each of any number of ranks reads of them."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.tensor import Shard

import surefoot as sf
from surefoot.errors import CheckpointError
from surefoot.keep.checkpoint import manifest as manifest_file
from surefoot.keep.checkpoint.listing import list_checkpoints, part_name
from surefoot.keep.checkpoint.manifest import MANIFEST, STATE, TENSORS
from surefoot.keep.checkpoint.parts import SavedParts
from surefoot.keep.checkpoint.shards import SavedShards, Spread, _layout, cut, whole_tensors
from surefoot.keep.checkpoint.storage import write_flat
from surefoot.keep.checkpoint.tree import Flattened

WHOLE = torch.arange(35.0).reshape(7, 5)
SMALL = torch.arange(3.0).to(torch.complex64)


def spread(value, rank, count):
    layout = _layout(tuple(value.shape), (Shard(0),), (count,), (rank,))
    part = cut(value, layout)
    return part, Spread(tuple(value.shape), tuple(part.shape), (Shard(0),), (count,), (rank,))


def save(folder, count, step=5, session=None, ranks=None, offset=0.0):
    """The parts of `count` ranks that hold the rows of two tensors, and a number of their own."""
    for rank in range(count) if ranks is None else ranks:
        big, small = spread(WHOLE + offset, rank, count), spread(SMALL, rank, count)
        tree = {"big": big[0], "small": [small[0]], "tied": big[0], "own": rank, "streams": torch.tensor([rank])}
        facts = {"quiet": True, "rank": rank, "world_size": count}
        facts |= {} if session is None else {"session": session}
        flattened = Flattened(tree, {id(part): how for part, how in (big, small)})
        write_flat(folder / part_name(step, rank), flattened, facts, step=step)
    (listing,) = (each for each in list_checkpoints(folder) if each.step == step)
    return listing


@pytest.mark.parametrize("now", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("then", [1, 2, 4])
def test_each_rank_of_another_number_reads_its_rows_and_what_one_rank_had(tmp_path, then, now):
    listing = save(tmp_path, then)
    for rank in range(now):
        parts = SavedParts(listing, rank, now)
        tree = parts.tree(parts.base)
        assert tree["own"] == rank % then
        assert parts.is_new_rank == (rank >= then)
        for name, value in (("big", WHOLE), ("tied", WHOLE)):
            layout = _layout((7, 5), (Shard(0),), (now,), (rank,))
            assert torch.equal(tree[name].part(layout), cut(value, layout))
        assert torch.equal(tree["small"][0].whole(), SMALL)
    assert [int(each) for each in parts.entries("streams")] == list(range(then))


def test_a_rank_that_reads_what_it_saved_opens_its_own_part_alone(tmp_path):
    listing = save(tmp_path, 4)
    for rank in (0, 1, 3):
        (listing.paths[rank] / STATE).write_text("[")
    parts = SavedParts(listing, 2, 4, shares_verifying=True)
    tree = parts.tree(2)
    assert torch.equal(tree["big"].part(tree["big"].own.layout), WHOLE[4:6])
    with pytest.raises(CheckpointError, match=STATE):
        tree["big"].whole()


def test_each_part_is_verified_by_one_of_the_ranks_that_share_it(tmp_path):
    listing = save(tmp_path, 4)
    file = listing.paths[3] / TENSORS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    SavedParts(listing, 0, 2, shares_verifying=True)
    with pytest.raises(CheckpointError, match="checksum"):
        SavedParts(listing, 1, 2, shares_verifying=True)
    with pytest.raises(CheckpointError, match="checksum"):
        SavedParts(listing, 0, 2)


def test_the_whole_state_is_loaded_by_a_script(tmp_path):
    save(tmp_path / "checkpoints", 4)
    manager = sf.CheckpointManager(tmp_path)
    tree = manager.load(whole=True).tree
    assert torch.equal(tree["big"], WHOLE)
    assert tree["big"] is not tree["small"]
    with pytest.raises(CheckpointError, match=r"load\(whole=True\)"):
        manager.load()


def test_parts_from_before_and_after_a_restart_are_not_one_step(tmp_path):
    save(tmp_path, 2, session="one")
    listing = save(tmp_path, 2, session="two", ranks=[0], offset=1.0)
    assert "before and after a restart" in listing.fault
    assert save(tmp_path, 2, session="two", ranks=[1], offset=1.0).whole


def test_shards_of_version_1_go_back_to_as_many_ranks_as_saved_them(tmp_path):
    listing = save(tmp_path, 2)
    for folder in listing.paths.values():
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest.pop("checksum")
        (folder / MANIFEST).write_bytes(manifest_file.rendered({**manifest, "schema": 1}))
    (listing,) = list_checkpoints(tmp_path)
    assert SavedParts(listing, 1, 2).tree(1)["own"] == 1
    with pytest.raises(CheckpointError, match="Start 2 processes once and save"):
        SavedParts(listing, 0, 3)


def test_a_tensor_that_was_not_spread_is_a_tensor(tmp_path):
    tree = SavedParts(save(tmp_path, 2), 0, 1).tree(0)
    assert isinstance(tree["streams"], torch.Tensor)
    assert isinstance(tree["big"], SavedShards)
    assert torch.equal(whole_tensors(tree)["tied"], WHOLE)
