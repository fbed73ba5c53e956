"""Odd but legal ways to use the stabilizer, each of which once broke a law of the design."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def guarded(model: nn.Module, **settings: Any) -> sf.TrainingStabilizer:
    return sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_parameter_exchanged_for_another_in_the_optimizer_is_guarded_too():
    model = net()
    stabilizer = guarded(model)
    stabilizer.backward(loss_of(model))
    stabilizer.step()
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    stabilizer.optimizer.param_groups[0]["params"][0] = model[0].weight
    model[0].weight.grad = torch.full_like(model[0].weight, torch.nan)
    assert stabilizer.step().skipped
    assert bool(model[0].weight.isfinite().all())


def test_a_parameter_group_may_be_taken_away():
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipPerTensor())
    for _ in range(2):
        stabilizer.backward(loss_of(model))
        assert stabilizer.step().applied
        del optimizer.param_groups[1:]


def test_several_losses_before_one_step_add_up_as_in_the_bare_loop():
    bare, model = net(), net()
    optimizer, stabilizer = torch.optim.SGD(bare.parameters(), lr=0.1), guarded(model)
    for seed in range(5):
        optimizer.zero_grad()
        loss_of(bare, seed).backward()
        (loss_of(bare, seed + 50) * 0.1).backward()
        optimizer.step()
        first, second = loss_of(model, seed), loss_of(model, seed + 50) * 0.1
        stabilizer.backward(first)
        stabilizer.backward(second)
        assert stabilizer.step().loss == (first + second).item()
    assert same(bare, model)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise MemoryError


def test_a_backward_that_failed_does_not_count_as_a_microbatch():
    bare, model = net(), net()
    stabilizer = guarded(model, accumulate=2)
    with pytest.raises(MemoryError):
        stabilizer.backward(Fails.apply(loss_of(model)))
    stabilizer.optimizer.zero_grad()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    for seed in range(2):
        (loss_of(bare, seed) / 2).backward()
        stabilizer.backward(loss_of(model, seed))
        outcome = stabilizer.step()
    optimizer.step()
    assert outcome.applied
    assert same(bare, model)


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_a_loss_of_shape_one_is_as_good_as_a_scalar(decide_on):
    model = net()
    stabilizer = guarded(model, decide_on=decide_on)
    stabilizer.backward(loss_of(model).reshape(1))
    assert stabilizer.step().applied


def test_backward_runs_where_gradients_are_off():
    model = net()
    stabilizer = guarded(model, accumulate=2)
    for _ in range(2):
        loss = loss_of(model)
        with torch.no_grad():
            stabilizer.backward(loss)
        outcome = stabilizer.step()
    assert outcome.applied
