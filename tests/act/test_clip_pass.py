"""Clipping in a pass of its own: chosen while few steps are clipped, and bitwise what the fused kernel does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.act.clip import limit_factor
from surefoot.act.clip_pass import WINDOW_STEPS, ClipPass, ClipRate
from surefoot.types import Signals, StepRecord

LIMIT = 0.5
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


def known(rate: ClipRate, *clipped: bool) -> bool:
    for each in clipped:
        rate.take(StepRecord(Signals(0, clip_factor=0.5 if each else 1.0), False))
    return rate.rare


def test_nothing_is_known_before_a_window_of_steps():
    rate = ClipRate()
    assert not known(rate, *[False] * (WINDOW_STEPS - 1))
    assert known(rate, False)


def test_the_choice_changes_only_when_the_rate_is_clearly_on_the_other_side():
    rate = ClipRate()
    assert known(rate, *[False] * WINDOW_STEPS)
    assert known(rate, *[True, False] * WINDOW_STEPS), "half of the steps"
    assert known(rate, *[True, True, False] * WINDOW_STEPS), "two thirds: not often enough to go back"
    assert not known(rate, *[True] * WINDOW_STEPS)
    assert not known(rate, *[True, True, False] * WINDOW_STEPS), "two thirds: not rare enough to come again"
    assert known(rate, *[True, False] * WINDOW_STEPS)


def test_a_skipped_step_says_nothing_about_clipping():
    rate = ClipRate()
    for _ in range(3 * WINDOW_STEPS):
        rate.take(StepRecord(Signals(0), True))
    assert not rate.rare


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    size = 0.01 if step % 4 else 100.0  # one step in four is clipped
    return (model(x).square().mean() + model(x).sum() * 1e-3) * (float("nan") if step == 50 else size)


def by_hand(make: Any, steps: int) -> list[list[torch.Tensor]]:
    """The fused kernel divides, on every step: parameters and gradients after each."""
    model, seen = small_model(), []
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.grad_scale = 1 / limit_factor(norm, LIMIT)
        optimizer.found_inf = torch.tensor(float(not norm.isfinite()))
        optimizer.step()
        seen.append([copy.deepcopy(each) for p in model.parameters() for each in (p.data, p.grad)])
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_ways_of_clipping_lead_to_the_same_bits(name: str):
    model, folded, steps = small_model(), [], 100
    optimizer = OPTIMIZERS[name](model.parameters())
    optimizer.register_step_pre_hook(lambda opt, *_: folded.append(getattr(opt, "grad_scale", None) is not None))
    stabilizer = sf.TrainingStabilizer(
        model, optimizer, clip=sf.ClipByNorm(LIMIT), decide_on="device", zero_grad=False, checker=sf.StabilityChecker()
    )
    reference = by_hand(OPTIMIZERS[name], steps)
    for step in range(steps):
        optimizer.zero_grad()
        stabilizer.backward(loss_of(model, step))
        stabilizer.step()
        for mine, theirs in zip([e for p in model.parameters() for e in (p, p.grad)], reference[step], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert folded[:WINDOW_STEPS] == [True] * WINDOW_STEPS, "before enough steps are known"
    assert not any(folded[2 * WINDOW_STEPS :]), "one step in four is clipped: a pass of its own is cheaper"
    assert stabilizer.counts["skipped"] == 1


def test_a_run_that_is_always_clipped_leaves_it_to_the_optimizers_kernel():
    model, folded = small_model(), []
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    optimizer.register_step_pre_hook(lambda opt, *_: folded.append(getattr(opt, "grad_scale", None) is not None))
    stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(1e-6), decide_on="device")
    for step in range(45):
        stabilizer.backward(loss_of(model, step))
        stabilizer.step()
    assert all(folded)


def test_a_step_that_is_not_clipped_writes_no_gradient_when_the_host_decides():
    model, written, folded = small_model(), [], []
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    weight, before = model[0].weight, []

    def look(opt: Any, *_: Any) -> None:
        written.append(weight.grad._version > before.pop())
        folded.append(getattr(opt, "grad_scale", None) is not None)

    optimizer.register_step_pre_hook(look)
    stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(LIMIT), decide_on="host")
    for step in range(8):
        stabilizer.backward(loss_of(model, step))
        before.append(weight.grad._version)
        stabilizer.step()
    assert written == [step % 4 == 0 for step in range(8)]
    assert not any(folded), "dividing by the inverse of the factor would round differently"


def test_gradients_in_half_precision_are_left_to_the_kernel_which_does_not_round_in_between():
    model = small_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    way = ClipPass()
    known(way.rate, *[False] * WINDOW_STEPS)
    gradients = [torch.ones(3), torch.ones(2, 2)]
    assert way.serves(optimizer, gradients)
    assert not way.serves(optimizer, [*gradients, torch.ones(3, dtype=torch.bfloat16)])
    assert not way.serves(optimizer, [torch.ones(4, 4)[:, ::2]]), "memory with gaps"


def test_a_second_guard_sees_the_gradients_as_backward_left_them():
    def norms(inner_only: bool) -> list[float]:
        model, seen = small_model(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
        attached = sf.attach(model, optimizer, mode="watch", on_step=lambda r: seen.append(r.signals.grad_norm))
        limit = 1e6 if inner_only else LIMIT
        stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(limit), decide_on="device")
        for step in range(45):
            stabilizer.backward(loss_of(model, step))
            stabilizer.step()
        attached.detach()
        return seen

    assert norms(inner_only=False) == norms(inner_only=True)


def test_an_optimizer_that_cannot_be_hashed_is_clipped_in_its_kernel():
    class Compared(torch.optim.AdamW):
        def __eq__(self, other: object) -> bool:
            return self is other

    model = small_model()
    stabilizer = sf.TrainingStabilizer(
        model, Compared(model.parameters(), fused=True), clip=sf.ClipByNorm(LIMIT), decide_on="device"
    )
    for step in range(3):
        stabilizer.backward(loss_of(model, step))
        stabilizer.step()
    assert stabilizer.counts["applied"] == 3
