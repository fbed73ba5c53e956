"""Updates on CUDA, derived from the optimizer's state without a copy of the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.core.block_tables import BLOCK
from surefoot.guard.context import GuardSettings, build_guard
from surefoot.guard.guarded_optimizer import StepFacts
from surefoot.observe.parameters import Layout
from surefoot.observe.updates import UpdateMeter
from surefoot.types import NamedParameter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, fused=True),
    "maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True, fused=True),
    "no first moment": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.0, 0.95), weight_decay=1.0, fused=True),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "weight_decay": 0.5}, {"params": p[2:], "lr": 3e-3, "weight_decay": 0.0}], fused=True
    ),
    "updates too small for most weights": lambda p: torch.optim.AdamW(p, lr=1e-9, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1, momentum=0.9, fused=True),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    values = (
        torch.randn(500, 70) * 0.02,
        torch.ones(4096),
        torch.zeros(3000),
        torch.randn(2 * BLOCK + 5) * 0.1,
        torch.randn(64, 3, 7, 7).to(memory_format=torch.channels_last),
    )
    return [nn.Parameter(value.cuda()) for value in values]


def named(own: list[nn.Parameter]) -> list[NamedParameter]:
    return [NamedParameter(str(i), parameter) for i, parameter in enumerate(own)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_derived_updates_agree_with_those_of_copies(name):
    own = parameters()
    optimizer = OPTIMIZERS[name](own)
    everything = sf.LayerMetrics(parameters=True, updates=True)
    derived, copied = UpdateMeter(everything), UpdateMeter(everything)
    for step in range(8):
        for parameter in own:
            parameter.grad = torch.randn_like(parameter)
        if name.startswith("sgd with") and step == 0:
            optimizer.step()  # allocates the momentum
            continue
        optimizer.found_inf = torch.full((), float(step == 5), device="cuda")
        derived_columns = derived.before(optimizer, named(own), derive=True)
        copied_columns = copied.before(optimizer, named(own), derive=False)
        optimizer.step()
        mine, theirs = derived_columns(optimizer, False), copied_columns(optimizer, False)
        for column in ("param_norm", "update_norm"):
            # The copy is rounded like the weights: one unit in their last place, of all of them.
            rounding = (2**-23 * theirs["param_norm"]).max().item()
            torch.testing.assert_close(mine[column], theirs[column], rtol=2e-5, atol=0.1 * rounding)
        assert bool(mine["update_norm"].any()) == (step != 5), step
    assert derived._derived._tables is not None, "no step was derived"


def test_a_moment_that_is_replaced_is_noticed():
    own = parameters()
    optimizer = OPTIMIZERS["adamw"](own)
    meter = UpdateMeter(sf.LayerMetrics(updates=True))
    for step in range(6):
        for parameter in own:
            parameter.grad = torch.randn_like(parameter)
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"] * 100
        before = [parameter.detach().clone() for parameter in own]
        columns = meter.before(optimizer, named(own), derive=True)
        optimizer.step()
        found = columns(optimizer, False)["update_norm"]
        moved = torch.stack([(now - then).norm() for now, then in zip(own, before, strict=True)])
        torch.testing.assert_close(found, moved, rtol=1e-4, atol=0)


def test_bf16_parameters_are_compared_with_a_copy():
    own = [nn.Parameter(parameter.detach().bfloat16()) for parameter in parameters()]
    optimizer = OPTIMIZERS["adamw"](own)
    meter = UpdateMeter(sf.LayerMetrics(updates=True))
    for _ in range(4):
        for parameter in own:
            parameter.grad = torch.randn_like(parameter)
        before = [parameter.detach().clone() for parameter in own]
        columns = meter.before(optimizer, named(own), derive=True)
        optimizer.step()
        found = columns(optimizer, False)["update_norm"]
        moved = torch.stack([(now - then).float().norm() for now, then in zip(own, before, strict=True)])
        torch.testing.assert_close(found, moved, rtol=1e-3, atol=0)


def test_everything_watched_never_waits_for_the_device_and_changes_nothing():
    def train(watch: sf.LayerMetrics | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        stabilizer = sf.TrainingStabilizer(model, optimizer, scheduler=schedule, watch=watch)
        x = torch.randn(16, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(50):
                stabilizer.backward(model(x).square().mean())
                outcome = stabilizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if watch is not None:
            assert bool((outcome.layers.update_norm > 0).all())
            assert bool((outcome.layers.param_norm[2] > 7.9).all()), "a LayerNorm of 64 ones"
        return [parameter.detach() for parameter in model.parameters()]

    watched = train(sf.LayerMetrics(parameters=True, updates=True))
    assert all(torch.equal(a, b) for a, b in zip(watched, train(None), strict=True))


def test_the_learning_rate_that_the_step_was_taken_with_counts():
    """A guard may cut it for the length of a step."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    watch = sf.LayerMetrics(parameters=True, updates=True)
    guard = build_guard([model], optimizer, Layout([model], optimizer), GuardSettings(watch=watch)).guarded
    for step in range(4):
        model.zero_grad()
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        before = model.weight.detach().clone()
        opened = guard.begin(StepFacts(step, None, 1.0, {}, 0.5))
        optimizer.step()
        layers = guard.end(opened).record().signals.layers
        moved = (model.weight.detach() - before).norm().cpu()
        torch.testing.assert_close(layers.update_norm[0], moved, rtol=2e-5, atol=0)
