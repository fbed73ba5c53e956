"""Two ranks over gloo that run out of memory apart; run by `test_microbatches_on_ranks.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import surefoot as sf
from scarce import Scarce

SCENARIOS: dict[str, Any] = {}


def scenario(function: Any) -> Any:
    SCENARIOS[function.__name__] = function
    return function


def net(fits: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Scarce(fits), nn.Linear(8, 2)).double()


def data(rank: int, step: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 * step + rank)).double()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def expected(steps: list[int], rows: int = 8) -> list[Tensor]:
    whole = net(10_000)
    sum(whole(data(r, s, rows)).square().mean() / 2 / len(steps) for r in range(2) for s in steps).backward()
    return gradients(whole)


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def stabilized(model: nn.Module, **settings: Any) -> sf.TrainingStabilizer:
    return sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


@scenario
def a_rank_that_runs_out_of_memory_gets_the_gradients_of_all(rank: int) -> None:
    model = DistributedDataParallel(net(fits=3 if rank == 1 else 100))
    stabilizer = stabilized(model)
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        stabilizer.run_microbatches(lambda x: model(x).square().mean(), data(rank, step))
        assert model.require_backward_grad_sync
        if step == 0:
            close(gradients(model), expected([0]))
        assert stabilizer.step().applied
        assert not torch.equal(before[0], next(model.parameters()))
    assert [i.kind for i in stabilizer.incidents] == (["memory.split"] if rank == 1 else [])
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert torch.equal(*both)


@scenario
def a_window_is_averaged_once(rank: int) -> None:
    model = DistributedDataParallel(net(fits=3 if rank == 0 else 100))
    stabilizer = stabilized(model, accumulate=2)
    for step in range(2):
        stabilizer.run_microbatches(lambda x: model(x).square().mean(), data(rank, step))
        if step == 0:
            stabilizer.step()
    close(gradients(model), expected([0, 1]))


@scenario
def tokens_are_counted_over_ranks(rank: int) -> None:
    rows = {0: 3, 1: 9}
    model = DistributedDataParallel(net(fits=4))
    stabilizer = stabilized(model)
    stabilizer.run_microbatches(lambda x: model(x).square().mean(), data(rank, 0, rows[rank]), weight=len)
    stabilizer.step()
    whole = net(10_000)
    whole(torch.cat([data(r, 0, n) for r, n in rows.items()])).square().mean().backward()
    found = [(a - b) / -0.1 for a, b in zip(model.parameters(), net(1).parameters(), strict=True)]
    for one, other in zip(found, gradients(whole), strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-5, atol=1e-7)


class Branching(nn.Module):
    """Each rank uses a layer of its own beside a common one."""

    def __init__(self, rank: int, fits: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.common, self.own = nn.Linear(6, 6).double(), nn.ModuleList(nn.Linear(6, 6).double() for _ in range(3))
        self.rank, self.scarce = rank, Scarce(fits)

    def forward(self, x: Tensor) -> Tensor:
        return self.own[self.rank](self.scarce(self.common(x)))


@scenario
def ranks_may_use_different_parameters(rank: int) -> None:
    inner = Branching(rank, 3)
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    stabilized(model).run_microbatches(lambda x: model(x).square().mean(), data(rank, 0))
    wholes = [Branching(r, 100) for r in range(2)]
    for r, whole in enumerate(wholes):
        whole(data(r, 0)).square().mean().backward()
    close([inner.common.weight.grad], [sum(w.common.weight.grad for w in wholes) / 2])
    close([inner.own[r].weight.grad for r in range(2)], [wholes[r].own[r].weight.grad / 2 for r in range(2)])
    assert inner.own[2].weight.grad is None


@scenario
def buffers_are_broadcast_as_ddp_does_and_no_rank_waits(rank: int) -> None:
    def model_with_norm(fits: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(6), Scarce(fits, when="forward"), nn.Linear(6, 2)).double()

    model = DistributedDataParallel(model_with_norm(fits=2 if rank == 1 else 100))
    stabilizer = stabilized(model)
    for step in range(3):
        stabilizer.run_microbatches(lambda x: model(x).square().mean(), data(rank, step))
        stabilizer.step()
    # Rank 0 runs whole batches, and its statistics are the ones that count, as without us.
    mean = torch.zeros(6).double()
    for step in range(3):
        mean = 0.9 * mean + 0.1 * data(0, step).mean(0)
    model(data(rank, 9, 2))  # whose forward broadcasts what rank 0 has
    after = 0.9 * mean + 0.1 * data(rank, 9, 2).mean(0)
    torch.testing.assert_close(model.module[0].running_mean, after)
    assert int(model.module[0].num_batches_tracked) == 4


@scenario
def one_rank_that_cannot_go_on_stops_all_and_all_can_begin_anew(rank: int) -> None:
    model = DistributedDataParallel(net(fits=100))
    stabilizer = stabilized(model, accumulate=2)
    stabilizer.run_microbatches(lambda x: model(x).square().mean(), data(rank, 0))
    stabilizer.step()
    model.module[2].fits = 0 if rank == 1 else 100
    wanted = torch.OutOfMemoryError if rank == 1 else sf.RankFailed
    with pytest.raises(wanted):
        stabilizer.run_microbatches(lambda x: model(x).square().mean(), data(rank, 1))
    assert gradients(model) == []
    assert stabilizer.steps == 0
    model.module[2].fits = 100
    for step in range(2):
        stabilizer.run_microbatches(lambda x: model(x).square().mean(), data(rank, step))
        if step == 0:
            stabilizer.step()
    close(gradients(model), expected([0, 1]))


@scenario
def an_unsplit_ddp_run_is_bitwise_the_bare_one(rank: int) -> None:
    def train(ours: bool) -> list[Tensor]:
        model = DistributedDataParallel(net(fits=100))
        stabilizer = stabilized(model)
        for step in range(5):
            if ours:
                stabilizer.run_microbatches(lambda x: model(x).square().mean(), data(rank, step))
            else:
                stabilizer.backward(model(data(rank, step)).square().mean())
            stabilizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


@scenario
def models_whose_forward_is_a_collective_are_refused(rank: int) -> None:
    sharded = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    fully_shard(sharded)
    synced = nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4))  # DDP takes it on GPUs only
    static = DistributedDataParallel(nn.Linear(6, 2), static_graph=True)
    nested = nn.Sequential(DistributedDataParallel(nn.Linear(6, 2)))
    for model, word in ((sharded, "FSDP2"), (synced, "SyncBatchNorm"), (static, "static_graph"), (nested, "inside")):
        with pytest.raises(sf.UsageError, match=word):
            stabilized(model).run_microbatches(lambda x: x.sum(), torch.ones(4, 6))
