"""Norms of parameters and of what a step did to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.observe.updates import UpdateMeter, _state_of, group_settings
from surefoot.types import NamedParameter

DERIVED: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adam with weight decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True),
    "no first moment": lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.0, 0.95), weight_decay=1.0),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[:1], "weight_decay": 0.5}, {"params": p[1:], "lr": 1e-4}], lr=1e-3
    ),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1, momentum=0.9, dampening=0.3),
}
NOT_DERIVED: dict[str, Any] = {
    "lr on the device": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "decay of everything": lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=1.0),
    "betas on the device": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(1e-3), betas=(torch.tensor(0.9), torch.tensor(0.99))
    ),
}


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(value.to(dtype)) for value in (torch.randn(40, 7), torch.ones(16), torch.zeros(5))]


def give_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def before_and_moved(optimizer: Any, parameter: nn.Parameter, settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What `triton_updates.py` computes, in float64: the parameter before the step, and how far it went."""
    has_momentum = bool(optimizer.param_groups[0].get("momentum"))
    _, first, second, count = (each.detach() for each in _state_of(optimizer, parameter, has_momentum))
    step = settings.rate * first
    if isinstance(optimizer, torch.optim.Adam):
        correction1 = 1 - torch.exp(count.double() * settings.log_beta1)
        correction2 = (1 - torch.exp(count.double() * settings.log_beta2)).sqrt()
        step = settings.rate / correction1 * first / (second.sqrt() / correction2 + settings.eps)
    shrunk = parameter.detach() + step
    before = shrunk + shrunk * settings.decay
    return before, before - parameter.detach()


@pytest.mark.parametrize("name", DERIVED)
def test_an_update_follows_from_what_the_optimizer_leaves_behind(name: str):
    own = parameters()
    optimizer = DERIVED[name](own)
    for _ in range(5):
        give_gradients(own)
        copies = [parameter.detach().clone() for parameter in own]
        optimizer.step()
        settings = group_settings(optimizer)
        groups = {id(p): settings[i] for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for parameter, copied in zip(own, copies, strict=True):
            before, moved = before_and_moved(optimizer, parameter, groups[id(parameter)])
            torch.testing.assert_close(before, copied, rtol=1e-6, atol=1e-12)
            expected = (parameter.detach() - copied).norm()
            torch.testing.assert_close(moved.norm(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NOT_DERIVED)
def test_what_does_not_follow_from_state_and_settings_is_measured(name: str):
    assert group_settings(NOT_DERIVED[name](parameters(torch.float32))) is None


@pytest.mark.parametrize("derive", [False, True])
@pytest.mark.parametrize("updates", [False, True])
def test_a_meter_is_used_step_after_step(derive: bool, updates: bool):
    own = parameters(torch.float32)
    named = [NamedParameter(str(i), parameter) for i, parameter in enumerate(own)]
    optimizer = torch.optim.AdamW(own, lr=1e-3, fused=True)
    meter = UpdateMeter(sf.LayerMetrics(parameters=True, updates=updates))
    for _ in range(3):
        give_gradients(own)
        before = [parameter.detach().clone() for parameter in own]
        columns = meter.before(optimizer, named, derive=derive)
        optimizer.step()
        found = columns(optimizer, False)
        torch.testing.assert_close(found["param_norm"], torch.stack([each.norm() for each in before]))
        assert ("update_norm" in found) == updates
        if updates:
            moved = [(now - then).norm().detach() for now, then in zip(own, before, strict=True)]
            torch.testing.assert_close(found["update_norm"], torch.stack(moved))


def test_sparse_complex_and_sharded_parameters_are_compared_by_their_values():
    own = [nn.Parameter(torch.randn(3, dtype=torch.complex64)), nn.Parameter(torch.randn(2))]
    named = [NamedParameter(str(i), parameter) for i, parameter in enumerate(own)]
    optimizer = torch.optim.SGD(own, lr=0.5)
    meter = UpdateMeter(sf.LayerMetrics(updates=True))
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    columns = meter.before(optimizer, named, derive=True)
    optimizer.step()
    found = columns(optimizer, False)["update_norm"]
    torch.testing.assert_close(found, torch.tensor([0.5 * 3**0.5, 0.5 * 2**0.5]))
