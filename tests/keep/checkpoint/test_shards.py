from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from surefoot.errors import CheckpointError, UsageError
from surefoot.keep.checkpoint.shards import (
    SavedShard,
    SavedShards,
    ShardLayout,
    Spread,
    _layout,
    cut,
    read_layout,
    whole_layout,
)

MESHES = {
    "rows over 4": ((Shard(0),), (4,)),
    "rows over 3": ((Shard(0),), (3,)),
    "columns over 2": ((Shard(1),), (2,)),
    "replicated": ((Replicate(),), (2,)),
    "replicas of shards": ((Replicate(), Shard(0)), (2, 2)),
    "rows and columns": ((Shard(0), Shard(1)), (2, 2)),
    "rows of rows": ((Shard(0), Shard(0)), (2, 3)),
    "sharded on top of tensor parallel": ((_StridedShard(0, split_factor=2), Shard(0)), (2, 2)),
    "sharded on top of columns": ((Shard(0), Shard(1)), (3, 2)),
    "one process": ((Shard(0),), (1,)),
}
SHAPES = [(7, 5), (1, 3), (8, 4), (2, 1), (0, 3)]


def layouts(mesh: str, shape: tuple[int, ...]) -> list[ShardLayout]:
    placements, sizes = MESHES[mesh]
    return [_layout(shape, placements, sizes, at) for at in product(*map(range, sizes))]


def saved(value: torch.Tensor, mesh: str) -> SavedShards:
    found = {}
    for rank, layout in enumerate(layouts(mesh, tuple(value.shape))):
        part = cut(value, layout)
        found.setdefault(layout, SavedShard(rank, layout, lambda at, part=part: part[at]))
    return SavedShards("value", tuple(value.shape), value.dtype, lambda: list(found.values()), None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("then", MESHES)
def test_shards_of_one_mesh_become_those_of_every_other(then, shape):
    value = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    shards = saved(value, then)
    assert torch.equal(shards.whole(), value)
    for now in MESHES:
        for layout in layouts(now, shape):
            assert torch.equal(shards.part(layout), cut(value, layout)), (now, layout)


def test_shards_on_top_of_tensor_parallel_are_interleaved_as_torch_cuts_them():
    found = layouts("sharded on top of tensor parallel", (7, 1))
    assert [layout.ranges[0] for layout in found] == [((0, 2),), ((4, 6),), ((2, 4),), ((6, 7),)]
    for size, factor, count in product(range(1, 12), (1, 2, 3, 4), (1, 2, 3)):
        placement = _StridedShard(0, split_factor=factor)
        parts = placement._split_tensor(torch.arange(size), count, with_padding=False, contiguous=True)[0]
        for place, part in enumerate(parts):
            layout = _layout((size,), (placement,), (count,), (place,))
            assert cut(torch.arange(size), layout).tolist() == part.tolist(), (size, factor, count, place)


def test_a_part_that_is_missing_is_an_error_and_not_a_tensor_of_whatever_was_in_memory():
    shards = saved(torch.zeros(7, 5), "rows over 4")
    lacking = SavedShards("value", shards.shape, shards.dtype, lambda: shards.shards()[1:], None)
    with pytest.raises(CheckpointError, match="hold 25 of the 35 values"):
        lacking.whole()
    assert lacking.part(layouts("rows over 4", (7, 5))[2]).shape == (2, 5)


def test_a_shard_that_is_not_what_its_layout_says_is_refused():
    wrong = SavedShard(0, whole_layout((4, 2)), lambda at: torch.zeros(1, 2))
    with pytest.raises(CheckpointError, match="where its layout says"):
        SavedShards("value", (4, 2), torch.float32, lambda: [wrong], None).whole()
    other = SavedShard(0, whole_layout((4, 2)), lambda at: torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(CheckpointError, match="int32"):
        SavedShards("value", (4, 2), torch.float32, lambda: [other], None).whole()


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"shape": [2], "ranges": []},
        {"shape": [2], "ranges": [[[0, 3]]]},
        {"shape": [2], "ranges": [[[1, 1]]]},
        {"shape": [-1], "ranges": [[]]},
        {"shape": [2.0], "ranges": [[[0, 1]]]},
        {"shape": [True], "ranges": [[[0, 1]]]},
        {"shape": 3, "ranges": [[[0, 1]]]},
    ],
)
def test_a_forged_layout_is_refused(entry):
    with pytest.raises(CheckpointError, match="invalid layout of shards"):
        read_layout(entry)


def test_a_layout_comes_back_as_it_was_stored():
    for mesh in MESHES:
        for layout in layouts(mesh, (7, 5)):
            assert read_layout(layout.stored()) == layout


def test_partial_sums_are_refused():
    with pytest.raises(UsageError, match="no value of its own"):
        _layout((4,), (Partial(),), (2,), (0,))


def test_a_shard_that_torch_would_have_cut_otherwise_is_refused():
    with pytest.raises(UsageError, match="divided in another way than torch does"):
        Spread((4,), (3,), (Shard(0),), (2,), (0,)).layout()


def test_a_process_outside_of_the_mesh_holds_nothing():
    assert Spread((4, 2), (0,), (Shard(0),), (2,), None).layout().local_shape == (0, 0)
