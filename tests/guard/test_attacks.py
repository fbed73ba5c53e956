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


def test_what_happened_can_be_read_after_a_halt_with_numbers_still_on_their_way():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    escalation = sf.Escalation(skips=0, cuts=0)
    stabilizer = sf.TrainingStabilizer(model, optimizer, decide_on="device", escalation=escalation)

    def break_it(times: int) -> None:
        for _ in range(times):
            stabilizer.backward(loss_of(model) * torch.nan)
            stabilizer.step()

    with pytest.raises(sf.TrainingHalted):
        break_it(20)
    assert "nonfinite" in stabilizer.summary()
    assert len(stabilizer.incidents) == stabilizer.steps
    with pytest.raises(sf.TrainingHalted):
        break_it(1)


def test_a_halt_does_not_call_broken_weights_healthy():
    model = net()
    stabilizer = guarded(model, escalation=sf.Escalation(skips=0, cuts=0))
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
    stabilizer.backward(loss_of(model))
    with pytest.raises(sf.TrainingHalted, match="weights are not finite"):
        stabilizer.step()


def test_a_users_signal_does_not_stand_in_for_a_measured_one():
    with pytest.raises(sf.UsageError, match="'grad_norm'"):
        guarded(net()).observe(grad_norm=float("inf"))


@pytest.mark.parametrize(("saved", "mine"), [(False, True), (True, False)])
def test_an_optimizer_state_that_brings_another_fused_flag_is_stepped_its_way(saved, mine):
    model = net()
    other = torch.optim.Adam(model.parameters(), fused=saved)
    optimizer = torch.optim.Adam(model.parameters(), fused=mine)
    stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(1e-3))
    optimizer.load_state_dict(other.state_dict())
    stabilizer.backward(loss_of(model))
    assert stabilizer.step().clipped


def test_an_unknown_place_to_decide_is_refused():
    with pytest.raises(sf.SettingError, match="'gpu'"):
        guarded(net(), decide_on="gpu")


def test_a_closure_may_return_its_loss_as_a_number():
    model = net()
    stabilizer = guarded(model)

    def closure() -> float:
        stabilizer.optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss.item()

    assert stabilizer.step(closure).applied


def test_a_cut_leaves_an_optimizer_without_a_learning_rate_alone():
    model = net()
    stabilizer = guarded(model, escalation=sf.Escalation(skips=0))
    stabilizer.optimizer.param_groups[0]["lr"] = None
    stabilizer.optimizer.step = lambda: None
    stabilizer.backward(loss_of(model) * torch.nan)
    assert stabilizer.step().skipped
    stabilizer.backward(loss_of(model))
    assert stabilizer.step().applied


def test_the_default_dtype_does_not_reach_our_own_arithmetic():
    model = net()
    default = torch.get_default_dtype()
    loss = loss_of(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        stabilizer = guarded(model, clip=sf.AdaptiveGradientClipper(), accumulate=7)
        stabilizer.backward(loss)
        stabilizer.flush()
    finally:
        torch.set_default_dtype(default)
    assert all(part.dtype is torch.float32 for part in stabilizer._run.guard.policy.clip_state)
    bare = net()
    loss_of(bare).backward()
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    for one, other in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_the_default_device_does_not_reach_our_own_tensors(decide_on):
    model = net()
    model[0].bias.requires_grad_(False)
    loss = loss_of(model)
    with torch.device("meta"):
        stabilizer = guarded(model, clip=sf.ClipPerTensor(), precision="fp16", decide_on=decide_on)
        stabilizer.backward(loss)
        assert stabilizer.step().applied


@pytest.mark.parametrize("clip", [sf.ClipPerTensor(), sf.AdaptiveGradientClipper()])
def test_a_state_of_a_model_with_more_parameters_is_loaded_and_training_continues(clip):
    large, small = net(), nn.Linear(4, 1)
    saved = guarded(large, clip=clip)
    saved.backward(loss_of(large))
    saved.step()
    stabilizer = guarded(small, clip=clip)
    stabilizer.load_state_dict(saved.state_dict())
    stabilizer.backward(loss_of(small))
    assert stabilizer.step().applied


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_what_one_rule_refused_is_no_baseline_for_another(decide_on):
    model = net()
    stabilizer = guarded(model, decide_on=decide_on)
    stabilizer.optimizer.param_groups[0]["lr"] = 0.0
    for seed in range(100):
        stabilizer.backward(loss_of(model, seed))
        stabilizer.step()
    peak = float(stabilizer._run.guard.policy.rules_state[1].peak)
    stabilizer.backward(loss_of(model, 3) * 30)
    assert stabilizer.step().reasons == ("spike",)
    assert float(stabilizer._run.guard.policy.rules_state[1].peak) == peak


def test_a_window_may_start_with_a_microbatch_of_weight_zero():
    bare, model = net(), net()
    stabilizer = guarded(model, accumulate=2)
    for weight in (0, 7):
        stabilizer.backward(loss_of(model, weight), weight=torch.tensor(weight))
        outcome = stabilizer.step()
    assert outcome.applied
    loss_of(bare, 7).backward()
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    for one, other in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_that_failed_and_was_thrown_away_is_no_part_of_the_next_one():
    model = net()
    stabilizer = guarded(model)
    stabilizer.backward(loss_of(model, 9))
    stabilizer.optimizer.zero_grad()
    loss = loss_of(model)
    stabilizer.backward(loss)
    assert stabilizer.step().loss == loss.item()


def test_zero_grad_in_the_middle_of_a_window_is_reported_once():
    model = net()
    stabilizer = guarded(model, accumulate=2)
    for _ in range(6):
        stabilizer.optimizer.zero_grad()
        stabilizer.backward(loss_of(model))
        stabilizer.step()
    assert [incident.kind for incident in stabilizer.incidents] == ["optim.lost-microbatch"]


def test_sparse_gradients_with_repeated_rows_end_on_the_bits_of_the_bare_loop():
    def trained(guard: bool) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True)
        stabilizer = guarded(table)
        for seed in range(20):
            ids = torch.randint(0, 5, (64,), generator=torch.Generator().manual_seed(seed))
            loss = (table(ids) - torch.randn(64, 3, generator=torch.Generator().manual_seed(seed))).square().mean()
            if guard:
                stabilizer.backward(loss)
                assert stabilizer.step().applied
            else:
                loss.backward()
                stabilizer.optimizer.step()
                stabilizer.optimizer.zero_grad()
        return table.weight.detach()

    assert torch.equal(trained(guard=True), trained(guard=False))
