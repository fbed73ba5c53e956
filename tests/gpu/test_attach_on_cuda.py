"""`attach` where a wait for the device costs something: none with fused optimizers, and refused steps bitwise."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.guard.context import GuardSettings, build_guard
from surefoot.guard.guarded_optimizer import StepFacts
from surefoot.observe.parameters import Layout
from surefoot.watch.guard import RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAN = float("nan")
FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
}
PLAIN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}
OPTIMIZERS = FUSED | PLAIN
ATTACHED: dict[str, dict[str, Any]] = {
    "guard": {},
    "guard with clip": {"clip": sf.ClipByNorm(0.5)},
    "watch": {"mode": "watch"},
}


def built(optimizer: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()
    return model, OPTIMIZERS[optimizer](model.parameters())


@contextmanager
def no_syncs() -> Iterator[None]:
    """Any wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(model: nn.Module, optimizer: Any, steps: int, scaler: Any = None, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator("cuda").manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(16, 32, device="cuda", generator=generator)).square().mean()
        (loss if scaler is None else scaler.scale(loss * 64)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def state_of(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    moments = [
        value
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return copy.deepcopy([*model.state_dict().values(), *moments])


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("attached", ATTACHED)
@pytest.mark.parametrize("optimizer", FUSED)
def test_fifty_steps_of_a_fused_optimizer_never_wait_for_the_device(optimizer, attached):
    model, opt = built(optimizer)
    attachment = sf.attach(model, opt, **ATTACHED[attached])
    train(model, opt, 10)
    x = torch.randn(16, 32, device="cuda")
    with no_syncs():
        for _ in range(50):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
    assert attachment.counts["applied"] == 60


@pytest.mark.parametrize("optimizer", PLAIN)
def test_watching_an_optimizer_that_is_not_fused_never_waits_either(optimizer):
    model, opt = built(optimizer)
    attachment = sf.attach(model, opt, mode="watch")
    train(model, opt, 10)
    x = torch.randn(16, 32, device="cuda")
    with no_syncs():
        for _ in range(50):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
    assert attachment.counts["applied"] == 60


@pytest.mark.parametrize("attached", ATTACHED)
def test_fifty_steps_under_a_grad_scaler_never_wait_for_the_device(attached):
    model, opt = built("adamw")
    attachment = sf.attach(model, opt, **ATTACHED[attached])
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    train(model, opt, 10, scaler)
    x = torch.randn(16, 32, device="cuda")
    with no_syncs():
        for _ in range(50):
            opt.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
    attachment.detach()
    assert attachment.counts["applied"] == 60
    assert attachment.history[-1].signals.loss_scale == 1024.0


@pytest.mark.parametrize("attached", ["guard", "watch"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_healthy_attached_run_is_bitwise_the_bare_run(optimizer, scaled, attached):
    def run(attach: bool) -> list[torch.Tensor]:
        model, opt = built(optimizer)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=10) if scaled else None
        attachment = sf.attach(model, opt, **ATTACHED[attached]) if attach else None
        train(model, opt, 40, scaler)
        if attachment is not None:
            attachment.detach()
            assert attachment.counts["alarms"] == 0
        return state_of(model, opt)

    assert same(run(False), run(True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_refused_step_is_bitwise_none(optimizer):
    model, opt = built(optimizer)
    attachment = sf.attach(model, opt)
    train(model, opt, 8)
    before = state_of(model, opt)
    for _ in range(3):
        opt.zero_grad()
        (model(torch.randn(16, 32, device="cuda")) * NAN).mean().backward()
        opt.step()
    assert same(before, state_of(model, opt))
    train(model, opt, 3, first=8)
    assert not same(before, state_of(model, opt))
    assert attachment.counts["skipped"] == 3
    assert attachment.counts["applied"] == 11


def test_a_guard_and_a_grad_scaler_decide_together():
    model, opt = built("adamw")
    attachment = sf.attach(model, opt, clip=sf.ClipByNorm(1e-2))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**127)
    train(model, opt, 40, scaler)
    counts = attachment.counts
    assert counts["overflows"] == counts["skipped"] > 0
    assert counts["applied"] + counts["skipped"] == 40
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not hasattr(opt, "grad_scale")


@pytest.mark.parametrize("fused", [True, False])
def test_what_breaks_after_unscale_is_no_overflow(fused: bool) -> None:
    model = nn.Linear(4, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    attachment = sf.attach(model, optimizer, escalation=None)
    for _ in range(8):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4, device="cuda")).square().mean()).backward()
        scaler.unscale_(optimizer)
        model.weight.grad[0, 0] = NAN
        scaler.step(optimizer)
        scaler.update()
    counts = attachment.counts
    assert (counts["skipped"], counts["alarms"], counts["overflows"]) == (8, 8, 0)


def test_watching_beside_a_guard_counts_what_the_guard_has_left_out_without_a_wait() -> None:
    model, optimizer = built("adamw")
    guard, watch = sf.attach(model, optimizer), sf.attach(model, optimizer, mode="watch")
    x = torch.randn(16, 32, device="cuda")
    for step in range(20):
        optimizer.zero_grad()
        (model(x).square().mean() * (NAN if step in (12, 13) else 1.0)).backward()
        if step in range(12, 15):  # the numbers of the bad steps arrive later, and are explained by looking at weights
            with no_syncs():
                optimizer.step()
        else:
            optimizer.step()
    assert watch.counts["skipped"] == guard.counts["skipped"] == 2


def test_statistics_that_were_loaded_are_what_a_refused_step_goes_back_to() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    attachment = sf.attach(model, optimizer)
    for step in range(12):
        if step == 6:
            state = copy.deepcopy(model.state_dict())
            state["1.running_mean"].fill_(5.0)
            model.load_state_dict(state)
            model.eval()
        optimizer.zero_grad()
        (model(torch.randn(8, 4, device="cuda")).sum() * (NAN if step in (4, 7) else 1.0)).backward()
        optimizer.step()
    attachment.detach()
    assert attachment.counts["skipped"] == 2
    assert model[1].running_mean.tolist() == [5.0] * 4


def test_rules_that_remember_nothing_are_decided_by_a_recorded_graph_too() -> None:
    """`surefoot run` has no other rule: without the graph each of its steps would launch a hundred small kernels."""
    model, optimizer = built("adamw")
    guarded = build_guard([model], optimizer, Layout([model], optimizer), GuardSettings("watch", checker=RULES)).guarded
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(16, 32, device="cuda")).square().mean().backward()
        opened = guarded.begin(StepFacts(step, torch.ones((), device="cuda"), 1.0, {}, 1.0))
        optimizer.step()
        assert not guarded.end(opened).record().skipped
    assert guarded._graphed._recorded
