"""Settings that are not finite, and looking at a run, on a CUDA device. Left out where there is none."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import surefoot as sf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REASON = "nonfinite-setting"


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()


@contextmanager
def no_syncs() -> Iterator[None]:
    """Any wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def state_of(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    moments = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    return [copy.deepcopy(torch.as_tensor(each)) for each in (*model.state_dict().values(), *moments)]


@pytest.mark.parametrize("bad_step", [1, 12])  # the first before the judgement is a CUDA graph, the second after
@pytest.mark.parametrize("lr", ["number", "tensor", "tensor on the host"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_learning_rate_that_is_nan_is_refused_and_named(fused: bool, lr: str, bad_step: int) -> None:
    model = small_model()
    rate: Any = {"number": 1e-3, "tensor": torch.tensor(1e-3).cuda(), "tensor on the host": torch.tensor(1e-3)}[lr]
    capturable = {"capturable": True} if lr == "tensor" else {}
    if lr == "tensor on the host" and not fused:
        pytest.skip("torch takes no such rate together with foreach")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=fused, **capturable)
    stabilizer = sf.TrainingStabilizer(model, optimizer)
    for step in range(20):
        group, before = optimizer.param_groups[0], state_of(model, optimizer)
        if step == bad_step:
            group["lr"] = rate * math.nan
        stabilizer.backward(model(torch.randn(16, 32, device="cuda")).square().mean())
        outcome = stabilizer.step()
        group["lr"] = rate
        assert outcome.skipped == (step == bad_step)
        after = state_of(model, optimizer)
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        assert same == (step == bad_step)
        if step == bad_step:
            assert outcome.reasons == (REASON,)
            assert "lr of parameter group 0 is nan" in repr(outcome)
    [incident] = stabilizer.incidents
    assert (incident.step, incident.kind) == (bad_step, REASON)


@pytest.mark.parametrize("lr", ["number", "tensor"])
def test_judging_the_settings_never_waits_for_the_device(lr: str) -> None:
    model = small_model()
    rate: Any = torch.tensor(1e-3).cuda() if lr == "tensor" else 1e-3
    broken: Any = torch.tensor(math.nan).cuda() if lr == "tensor" else math.nan
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=lr == "tensor")
    stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(1.0))
    x = torch.randn(16, 32, device="cuda")
    stabilizer.backward(model(x).square().mean())
    stabilizer.step()
    with no_syncs():
        for step in range(100):
            optimizer.param_groups[0]["lr"] = broken if step in (20, 60) else rate
            stabilizer.backward(model(x).square().mean())
            stabilizer.step()
    assert [record.signals.step for record in stabilizer.history if record.skipped] == [21, 61]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


READS: dict[str, Callable[[sf.TrainingStabilizer, sf.Outcome], object]] = {
    "counts": lambda s, o: s.counts,
    "history": lambda s, o: s.history,
    "incidents": lambda s, o: s.incidents,
    "summary": lambda s, o: s.summary(),
    "state_dict": lambda s, o: s.state_dict(),
    "the outcome": lambda s, o: (repr(o), o.applied, o.loss, o.layers),
}


def train(read: Callable[[sf.TrainingStabilizer, sf.Outcome], object] | None) -> tuple[list[torch.Tensor], set[str]]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    stabilizer = sf.TrainingStabilizer(
        model,
        optimizer,
        escalation=sf.Escalation(skips=1, cuts=8, calm_steps=15),
        recovery=sf.TrainingRecovery(every_steps=5, patience_steps=4, patience_refused=3),
    )
    generator = torch.Generator("cuda").manual_seed(0)
    for step in range(90):
        x = torch.randn(16, 32, device="cuda", generator=generator)
        if step == 50:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(30.0)
        factor = math.nan if step in (10, 11, 12, 30, 31, 70) else 1.0
        stabilizer.backward((model(x) - x[:, :8]).square().mean() * factor)
        outcome = stabilizer.step()
        if read is not None:
            read(stabilizer, outcome)
    return state_of(model, optimizer), {incident.action for incident in stabilizer.incidents}


def test_reading_after_every_step_leaves_every_bit_as_it_is() -> None:
    unread, actions = train(None)
    assert {"skip", "back_off", "roll_back"} <= actions
    for name, read in READS.items():
        state, _ = train(read)
        assert all(map(torch.equal, unread, state)), name
