"""Scenarios that two ranks play together over gloo; run by `test_distributed.py`, one result line per scenario."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import surefoot as sf

SCENARIOS: dict[str, Any] = {}


def scenario(function: Any) -> Any:
    SCENARIOS[function.__name__] = function
    return function


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data(rank: int, step: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 * step + rank)).double()


def weights(model: nn.Module) -> list[Tensor]:
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in parameters]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def same_on_all_ranks(model: nn.Module) -> bool:
    mine = torch.cat([w.flatten() for w in weights(model)])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    return torch.equal(*both)


def relative(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@scenario
def what_one_rank_refuses_no_rank_applies(rank: int) -> None:
    model = DistributedDataParallel(net())
    stabilizer = sf.TrainingStabilizer(model, torch.optim.AdamW(model.parameters(), fused=True))
    for step in range(6):
        before = weights(model)
        loss = model(data(rank, step)).square().mean()
        if step == 3 and rank == 1:
            loss = loss + torch.tensor(math.nan)  # the loss alone: this rank's gradients are fine
        stabilizer.backward(loss)
        assert stabilizer.step().skipped == (step == 3)
        assert equal(before, weights(model)) == (step == 3)
    assert same_on_all_ranks(model)


@scenario
def ranks_agree_when_ddp_lies_inside_a_wrapper(rank: int) -> None:
    model = nn.Sequential(DistributedDataParallel(net()))
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)
    for step in range(8):
        loss = model(data(rank, step)).square().mean()
        stabilizer.backward(loss * (math.nan if step == 4 and rank == 1 else 1.0))
        outcome = stabilizer.step()
        assert step % 2 == 0 or outcome.skipped == (step == 5)
    assert same_on_all_ranks(model)


@scenario
def names_are_those_of_the_model_inside_ddp(rank: int) -> None:
    model = DistributedDataParallel(net())
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    stabilizer.backward(model(data(rank, 0)).square().mean())
    assert stabilizer.step().layers.names == ("0.weight", "0.bias", "2.weight", "2.bias")


@scenario
def a_guarded_ddp_run_is_bitwise_the_bare_one(rank: int) -> None:
    def train(guard: bool) -> list[Tensor]:
        model = DistributedDataParallel(net())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        stabilizer = sf.TrainingStabilizer(model, optimizer, accumulate=2) if guard else None
        for step in range(20):
            for micro in range(2):
                x = data(rank, 2 * step + micro)
                if stabilizer is not None:
                    stabilizer.backward(model(x).square().mean())
                    stabilizer.step()
                elif micro == 0:
                    with model.no_sync():
                        (model(x).square().mean() / 2).backward()
                else:
                    (model(x).square().mean() / 2).backward()
            if stabilizer is None:
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)

    assert equal(train(False), train(True))


@scenario
def microbatches_within_a_window_are_not_averaged_over_ranks(rank: int) -> None:
    model = DistributedDataParallel(net())
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=3)
    synced = []
    for micro in range(6):
        synced.append(model.require_backward_grad_sync)
        stabilizer.backward(model(data(rank, micro)).square().mean())
        stabilizer.step()
    assert synced == [False, False, True] * 2
    assert same_on_all_ranks(model)


@scenario
def a_window_that_ends_early_is_averaged_over_ranks_and_corrected(rank: int) -> None:
    model = DistributedDataParallel(net())
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=4)
    for micro in range(3):
        stabilizer.backward(model(data(rank, micro)).square().mean())
        stabilizer.step()
    stabilizer.flush()
    whole = net()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    whole(torch.cat([data(r, m) for r in range(2) for m in range(3)])).square().mean().backward()
    optimizer.step()
    assert relative(weights(model), weights(whole)) < 1e-6
    assert same_on_all_ranks(model)


@scenario
def uneven_weights_over_ranks_equal_the_whole_batch(rank: int) -> None:
    rows = {(r, m): 1 + 3 * r + 2 * m for r in range(2) for m in range(2)}
    model = DistributedDataParallel(net())
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)
    for micro in range(2):
        x = data(rank, micro, rows[rank, micro])
        stabilizer.backward(model(x).square().mean(), weight=len(x))
        stabilizer.step()
    whole = net()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    whole(torch.cat([data(r, m, n) for (r, m), n in rows.items()])).square().mean().backward()
    optimizer.step()
    assert relative(weights(model), weights(whole)) < 1e-6


def sharded() -> nn.Module:
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    return model


@scenario
def a_sharded_model_is_measured_whole(rank: int) -> None:
    model = sharded()
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1), clip=sf.ClipByNorm(0.01))
    stabilizer.backward(model(data(rank, 0)).square().mean())
    outcome = stabilizer.step()
    whole = net()
    (sum(whole(data(r, 0)).square().mean() for r in range(2)) / 2).backward()
    expected = [float(p.grad.norm()) for p in whole.parameters()]
    torch.testing.assert_close(outcome.layers.grad_norm, torch.tensor(expected), rtol=1e-6, atol=0, check_dtype=False)
    assert outcome.clipped


@scenario
def a_guarded_sharded_run_is_bitwise_the_bare_one_and_refuses_together(rank: int) -> None:
    def train(guard: bool, fused: bool) -> list[Tensor]:
        model = sharded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        stabilizer = sf.TrainingStabilizer(model, optimizer) if guard else None
        for step in range(10):
            loss = model(data(rank, step)).square().mean()
            if stabilizer is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                stabilizer.backward(loss)
                assert stabilizer.step().applied
        if stabilizer is not None:
            before = weights(model)
            stabilizer.backward(model(data(rank, 0)).square().mean() * (math.nan if rank == 1 else 1.0))
            assert stabilizer.step().skipped
            assert equal(before, weights(model))
        return weights(model)

    for fused in (False, True):
        assert equal(train(False, fused), train(True, fused))
