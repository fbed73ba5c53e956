"""`StepDecider`: one step's decision, with the states of the policy that it advances."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import surefoot as sf
from surefoot.act.apply import OuterScaling
from surefoot.detect.combine import Combined
from surefoot.guard.step_decision import StepDecider, StepDecision, StepInput, StepPolicy
from surefoot.observe.tensors import TensorStatistics

CPU = torch.device("cpu")


def decider(on_device: bool, clipper: Any = None, scaler: Any = None) -> StepDecider:
    rules = Combined(sf.StabilityChecker().step_rules, "any")
    policy = StepPolicy(rules, None, clipper, scaler, count=2, home=CPU, on_device=on_device)
    return StepDecider(policy, group=None)


def given(on_device: bool, norm: float = 1.0, nonfinite: float = 0.0, **more: Any) -> StepInput:
    statistics = TensorStatistics(
        torch.tensor([norm, norm]), torch.tensor([norm, norm]), torch.tensor([nonfinite, 0.0])
    )
    broken = torch.zeros(()) if on_device else 0.0
    return StepInput(0, statistics, torch.tensor(1.0), 1.0, {}, torch.tensor(10.0), broken, **more)


def flags(decision: StepDecision) -> tuple[bool, bool]:
    return bool(decision.skip), bool(decision.overflow)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_step_that_is_not_finite_is_refused_and_a_healthy_one_is_not(on_device):
    one = decider(on_device)
    assert flags(one.decide(given(on_device))) == (False, False)
    assert flags(one.decide(given(on_device, norm=float("nan"), nonfinite=1.0))) == (True, False)
    assert flags(one.decide(given(on_device))) == (False, False)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_under_an_outer_loss_scale_it_is_an_overflow_and_the_norm_is_unscaled(on_device):
    one = decider(on_device)
    outer = OuterScaling(torch.tensor(4.0), torch.tensor(0.0), is_loss_scale=True)
    healthy = one.decide(given(on_device, norm=8.0, outer=outer))
    assert float(healthy.grad_norm) == pytest.approx(2.0 * 2**0.5)
    assert float(healthy.loss_scale) == 4.0
    assert healthy.divide is None, "the optimizer divides by it itself"
    found = OuterScaling(torch.tensor(4.0), torch.tensor(1.0), is_loss_scale=True)
    assert flags(one.decide(given(on_device, norm=float("nan"), nonfinite=1.0, outer=found))) == (True, True)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_refused_step_leaves_the_clippers_history_as_it_was(on_device):
    one = decider(on_device, clipper=sf.AdaptiveGradientClipper())
    one.decide(given(on_device))
    before = [part.clone() for part in one.policy.clip_state]
    one.decide(given(on_device, norm=float("nan"), nonfinite=1.0))
    assert all(map(torch.equal, before, one.policy.clip_state))


def test_a_policy_continues_from_its_saved_state_and_starts_again_with_other_settings():
    one = decider(True, clipper=sf.AdaptiveGradientClipper(), scaler=sf.DynamicLossScaler())
    for _ in range(3):
        one.decide(given(True))
    saved = one.policy.state_dict()
    same = decider(True, clipper=sf.AdaptiveGradientClipper(), scaler=sf.DynamicLossScaler())
    same.policy.load_state_dict(saved)
    assert all(map(torch.equal, one.policy.clip_state, same.policy.clip_state))
    other = decider(True, clipper=sf.AdaptiveGradientClipper(factor=3.0), scaler=sf.DynamicLossScaler())
    other.policy.load_state_dict(saved)
    assert not all(map(torch.equal, one.policy.clip_state, other.policy.clip_state))


def test_all_numbers_travel_in_one_vector():
    decision = decider(True).decide(given(True))
    packed = decision.packed()
    assert packed.ndim == 1
    assert len(packed) == 2 + len(decision.flags) + len(decision.head) + 3 * 2
