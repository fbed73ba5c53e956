"""`GuardedOptimizer`: what `begin` changes for a step, `end` puts back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from counted import Operations
from surefoot.guard.context import GuardSettings, build_guard
from surefoot.guard.guarded_optimizer import GuardedOptimizer, StepFacts
from surefoot.observe.parameters import Layout

NAN = float("nan")


def guarded(make: Any, **settings: Any) -> tuple[nn.Linear, Any, GuardedOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    context = build_guard([model], optimizer, Layout([model], optimizer), GuardSettings(**settings))
    return model, optimizer, context.guarded


def backward(model: nn.Linear, times: float = 1.0) -> None:
    model.zero_grad()
    (model(torch.ones(4, 3)).square().mean() * times).backward()


def facts(step: int = 0, lr_factor: float = 1.0) -> StepFacts:
    return StepFacts(step, None, 1.0, {}, lr_factor)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_fused_optimizer_is_given_what_its_kernel_divides_by_and_gets_it_taken_away_again():
    model, optimizer, guard = guarded(fused, clip=sf.ClipByNorm(1e-3), decide_on="device")
    backward(model)
    gradient = model.weight.grad.clone()
    step = guard.begin(facts())
    assert float(optimizer.grad_scale) > 1
    assert float(optimizer.found_inf) == 0
    assert torch.equal(model.weight.grad, gradient), "no pass over the gradients"
    guard.end(step)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_what_a_grad_scaler_has_set_is_combined_and_put_back():
    model, optimizer, guard = guarded(fused, clip=sf.ClipByNorm(1e-3), decide_on="device")
    theirs, found = torch.tensor(8.0), torch.tensor(0.0)
    optimizer.grad_scale, optimizer.found_inf = theirs, found
    backward(model, times=8.0)
    step = guard.begin(facts())
    record = guard.end(step).record()
    assert optimizer.grad_scale is theirs
    assert optimizer.found_inf is found
    assert record.signals.loss_scale == 8.0
    backward(model)
    expected = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    assert record.signals.grad_norm == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("make", [fused, plain])
def test_the_learning_rate_is_cut_for_the_step_alone(make):
    model, optimizer, guard = guarded(make)
    backward(model)
    step = guard.begin(facts(lr_factor=0.5))
    assert optimizer.param_groups[0]["lr"] == 0.05
    guard.end(step)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_refused_step_is_known_on_the_host_and_leaves_the_gradients():
    model, _, guard = guarded(plain, clip=sf.ClipByNorm(1e-3))
    backward(model, times=NAN)
    step = guard.begin(facts())
    assert step.refused
    assert step.refused_unchanged
    record = guard.end(step).record()
    assert record.skipped
    assert record.reasons == ("nonfinite",)


def test_an_observer_changes_nothing_and_says_what_would_have_refused_the_step():
    model, optimizer, guard = guarded(fused, mode="watch", decide_on="device")
    backward(model, times=NAN)
    before = dict(vars(optimizer))
    step = guard.begin(facts(lr_factor=0.5))
    assert vars(optimizer) == before
    record = guard.end(step).record()
    assert not record.skipped
    assert record.reasons == ("nonfinite",)


def test_without_a_gradient_there_are_no_numbers():
    _, _, guard = guarded(plain)
    assert guard.end(guard.begin(facts())) is None


@pytest.mark.parametrize("read_by", ["nothing", "log", "watch", "device"])
def test_the_largest_values_are_measured_where_something_reads_them(read_by, tmp_path):
    settings = {
        "log": {"log": tmp_path / "log"},
        "watch": {"watch": sf.LayerMetrics()},
        "device": {"decide_on": "device"},
    }
    model, _, guard = guarded(plain, **settings.get(read_by, {}))
    backward(model)
    largest = float(model.weight.grad.abs().max())
    with Operations() as run:
        step = guard.begin(facts())
    layers = guard.end(step).record().signals.layers
    passes = sum("aminmax" in name for name in run.names)
    if read_by == "nothing":
        assert layers.grad_largest is None
        assert passes == 0
    else:
        assert float(layers.grad_largest[0]) == largest
        assert passes >= 2
