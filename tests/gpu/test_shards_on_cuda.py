"""A model on a mesh of one GPU: its shards are saved with their place in the whole, and read with or without a mesh."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import surefoot as sf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(folder, spread):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).cuda()
    if spread:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=not spread)
    checkpoints = sf.CheckpointManager(folder, every_steps=None)
    return model, optimizer, sf.TrainingStabilizer(model, optimizer, checkpoints=checkpoints)


def full(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu()


@pytest.mark.parametrize("then", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("now", [False, True], ids=["to plain", "to sharded"])
def test_a_run_continues_with_the_same_weights_and_moments(one_rank, tmp_path, then, now):
    model, optimizer, stabilizer = made(tmp_path / "run", then)
    for step in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).cuda()
        stabilizer.backward(model(x).square().mean())
        stabilizer.step()
    stabilizer.save()
    other, its_optimizer, its = made(tmp_path / "run", now)
    assert its.restore() == 4
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(mine), full(theirs))
        for key, value in optimizer.state[mine].items():
            assert torch.equal(full(value), full(its_optimizer.state[theirs][key])), key
