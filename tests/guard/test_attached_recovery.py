"""An attached guard returns to earlier weights, is saved and loaded, and learns what the caller has clipped."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import surefoot as sf
from loops import differences, everything
from surefoot.errors import SettingError, UsageError


def built(seed: int = 0, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, inputs[:, :4].argmax(1)


def train(model: nn.Module, optimizer: Any, attachment: Any, steps: range, hurt: int | None = None) -> list[float]:
    losses = []
    for step in steps:
        if step == hurt:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data.mul_(30.0)
        inputs, labels = batch(step)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if attachment is not None:
            attachment.observe(loss=loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_weights_that_were_damaged_return_to_a_state_kept_in_memory():
    bare = train(*built(), None, range(160), hurt=100)
    model, optimizer = built()
    with sf.attach(model, optimizer, recovery=sf.TrainingRecovery()) as attachment:
        guarded = train(model, optimizer, attachment, range(160), hurt=100)
        assert [incident.action for incident in attachment.incidents].count("roll_back") == 1
    assert guarded[-1] < 0.5 * bare[-1]
    assert optimizer.param_groups[0]["lr"] == 1e-2  # the cut is for the length of a step


def test_a_rate_that_was_raised_by_mistake_is_limited_after_the_return():
    def trained(times: float) -> tuple[list[float], list[str]]:
        model, optimizer = built()
        with sf.attach(model, optimizer, recovery=sf.TrainingRecovery()) as attachment:
            losses = train(model, optimizer, attachment, range(100))
            optimizer.param_groups[0]["lr"] = 1e-2 * times
            losses += train(model, optimizer, attachment, range(100, 120))
            optimizer.param_groups[0]["lr"] = 1e-2
            losses += train(model, optimizer, attachment, range(120, 240))
            return losses, [str(each) for each in attachment.incidents if each.action == "roll_back"]

    (clean, _), (losses, returns) = trained(1.0), trained(100.0)
    assert len(returns) == 1
    assert "back to the state before step 100, kept in memory; learning rate at most 0.01" in returns[0]
    assert sum(losses[-50:]) < 1.05 * sum(clean[-50:])


@pytest.mark.parametrize("fused", [False, True])
def test_a_healthy_run_with_recovery_is_bitwise_the_bare_run(fused):
    model, optimizer = built(fused=fused)
    train(model, optimizer, None, range(50))
    guarded, its_optimizer = built(fused=fused)
    attachment = sf.attach(guarded, its_optimizer, recovery=sf.TrainingRecovery(every_steps=5))
    train(guarded, its_optimizer, attachment, range(50))
    assert differences(everything(model, optimizer), everything(guarded, its_optimizer)) == []


def test_a_saved_guard_continues_as_if_it_had_never_stopped():
    model, optimizer = built()
    attachment = sf.attach(model, optimizer, recovery=sf.TrainingRecovery())
    train(model, optimizer, attachment, range(30))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), attachment.state_dict()))
    train(model, optimizer, attachment, range(30, 60))
    again, its_optimizer = built(1)
    again.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    resumed = sf.attach(again, its_optimizer, recovery=sf.TrainingRecovery())
    resumed.load_state_dict(saved[2])
    assert resumed.steps == 30
    train(again, its_optimizer, resumed, range(30, 60))
    assert resumed.counts == attachment.counts
    one, other = attachment.state_dict(), resumed.state_dict()
    assert torch.equal(one["param_norm"], other["param_norm"])
    assert repr(one["policy"]) == repr(other["policy"])
    resumed.detach()
    with pytest.raises(UsageError, match="detached"):
        resumed.state_dict()


def test_gradients_that_the_caller_has_clipped_are_judged_as_they_were_before():
    model, optimizer = built()
    attachment = sf.attach(model, optimizer)
    inputs, labels = batch(0)
    F.cross_entropy(model(inputs), labels).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    attachment.observe(clip_factor=1e-3 / norm)
    optimizer.step()
    signals = attachment.history[-1].signals
    assert signals.grad_norm == pytest.approx(float(norm), rel=1e-3)
    assert signals.clip_factor == pytest.approx(1e-3 / float(norm))
    assert attachment.counts["clipped"] == 1
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    assert attachment.history[-1].signals.clip_factor == 1.0  # said of one step only


def test_a_loss_that_was_given_comes_before_the_one_a_closure_returns():
    model, optimizer = built()
    attachment = sf.attach(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch(0)[0]), batch(0)[1])
        loss.backward()
        return loss

    attachment.observe(loss=7.0)
    optimizer.step(closure)
    returned = optimizer.step(closure)
    assert [record.signals.loss for record in attachment.history] == [7.0, pytest.approx(returned.item())]


def test_recovery_keeps_neither_model_nor_optimizer_alive():
    model, optimizer = built()
    attachment = sf.attach(model, optimizer, recovery=sf.TrainingRecovery())
    train(model, optimizer, attachment, range(3))
    references = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
    assert attachment.counts["steps"] == 3


def test_recovery_is_for_a_guard_and_is_checked():
    model, optimizer = built()
    with pytest.raises(SettingError, match="mode='guard'"):
        sf.attach(model, optimizer, mode="watch", recovery=sf.TrainingRecovery())
    with pytest.raises(SettingError, match="TrainingRecovery"):
        sf.attach(model, optimizer, recovery=3)  # type: ignore[arg-type]
