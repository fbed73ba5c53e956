"""Calls are recorded while the recorder is entered, except those inside functions of torch that read each parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from surefoot.core.operations import entered_modes
from surefoot.watch.function_recorder import FunctionRecorder

if TYPE_CHECKING:
    from watched import Nursery

TRAIN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x = torch.randn(8, 4)

def step():
    model(x).square().mean().backward()
    CLIP
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    after = x.exp().sum()

for _ in range(6):
    step()
"""
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def recorder() -> FunctionRecorder:
    def directly(probe: str, observe: Any, *args: Any) -> Any:
        return observe(*args)

    return FunctionRecorder(lambda *given: None, directly)


def names(held: FunctionRecorder) -> list[str]:
    return [entry.name for entry in held.entries]


def test_while_it_is_set_aside_nothing_is_recorded():
    held = recorder()
    with held:
        torch.ones(2).exp()
        assert held.set_aside()
        assert not held.set_aside(), "it is aside already"
        torch.ones(2).log()
        held.take_up()
        held.take_up()
        torch.ones(2).sin()
    assert names(held) == ["ones", "exp", "ones", "sin"]
    assert entered_modes() == []


def test_it_is_not_set_aside_under_a_mode_of_the_script():
    held = recorder()
    with held, torch.device("cpu"):
        assert not held.set_aside()
        torch.ones(2).exp()
    assert "exp" in names(held)


def test_it_does_not_return_after_its_step_has_ended():
    held = recorder()
    held.__enter__()
    assert held.set_aside()
    held.paused += 1  # as at the end of a sampled step
    held.take_up()
    assert entered_modes() == []


def test_clipping_stepping_and_zeroing_are_not_recorded_and_what_follows_is(watch: Nursery):
    counts = [
        [step["operations"] for step in watch(TRAIN.replace("CLIP", clip)).facts["sampled_steps"]]
        for clip in (CLIP, "pass")
    ]
    assert counts[0] == counts[1]
    assert counts[0][2] == 3 + 2 + 2, "the model, the loss, and two calls after the step before"


def test_a_step_that_raised_does_not_end_the_recording(watch: Nursery):
    raising = """
def raise_once(*given):
    handle.remove()
    raise ValueError

handle = optimizer.register_step_pre_hook(raise_once)
try:
    step()
except ValueError:
    pass
"""
    run = watch(TRAIN.replace("CLIP", "pass").replace("for _ in", raising + "for _ in"))
    assert run.facts["problems"] == {}
    assert [step["operations"] for step in run.facts["sampled_steps"]][1:3] == [7, 7]
