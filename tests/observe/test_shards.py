"""The statistics of whole gradients from those of the shards of this rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from surefoot.observe.shards import combine_shards
from surefoot.observe.tensors import TensorMeter


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_plain_gradients_need_no_collective():
    gradients = [torch.ones(2), torch.ones(3)]
    local = TensorMeter().measure(gradients)
    assert combine_shards(local, gradients) is local


def test_a_shard_that_is_the_whole_gives_the_same_statistics(mesh):
    plain = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, float("nan")]), torch.tensor([2.0])]
    sharded = [
        distribute_tensor(plain[0], mesh, [Shard(0)]),
        distribute_tensor(plain[1], mesh, [Replicate()]),
        plain[2],
    ]
    local = TensorMeter().measure(sharded)
    whole = combine_shards(local, sharded)
    assert torch.allclose(whole.norm, torch.tensor([5.0, torch.nan, 2.0]), equal_nan=True)
    assert whole.largest[0] == 4.0
    assert whole.nonfinite.tolist() == [0.0, 1.0, 0.0]
