"""Networks that estimate values: signs and copies that only the author can judge keep a run from being healthy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from watched import Nursery

CRITIC = """
import copy
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
target = copy.deepcopy(critic)
actor = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1), nn.Tanh())
critics = torch.optim.Adam(critic.parameters(), lr=3e-3)
actors = torch.optim.Adam(actor.parameters(), lr=1e-3)
for step in range(150):
    state, action = torch.randn(64, 4), torch.rand(64, 1) * 2 - 1
    reward = -(action - state[:, :1].tanh()) ** 2
    following = state + 0.1 * torch.randn(64, 4)
    with torch.no_grad():
        goal = reward + 0.9 * target(torch.cat([following, actor(following)], 1))
    loss = F.mse_loss(critic(torch.cat([state, action], 1)), goal)
    critics.zero_grad()
    loss.backward()
    critics.step()
    value = critic(torch.cat([state, actor(state)], 1)).mean()
    actors.zero_grad()
    (-value).backward()
    actors.step()
    if step % 20 == 0:
        target.load_state_dict(critic.state_dict())
"""
ALONE = """
import copy
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
target = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(150):
    state, action = torch.randn(64, 4), torch.randint(2, (64, 1))
    reward = (state[:, :1] > 0).float() * action
    with torch.no_grad():
        goal = reward + 0.9 * target(state + 0.1).max(1, keepdim=True).values
    loss = F.smooth_l1_loss(model(state).gather(1, action), goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        target.load_state_dict(model.state_dict())
"""
COPY = "target.load_state_dict(model.state_dict())"


@pytest.mark.parametrize("script", [CRITIC, ALONE])
def test_an_actor_that_raises_values_and_a_target_that_follows_are_healthy(watch: Nursery, script: str) -> None:
    assert watch(script).diagnosis.verdict == "healthy"


def test_an_actor_that_lowers_the_values_of_its_critic_is_doubtful(watch: Nursery) -> None:
    run = watch(CRITIC.replace("(-value)", "value"))
    assert (run.diagnosis.verdict, run.causes) == ("unknown", [])
    assert "lowers the values that `critic` gives: that is right if they are costs" in run.diagnosis.summary


@pytest.mark.parametrize(
    "made", ["copy.deepcopy(model)", "nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))"]
)
def test_a_target_network_that_never_changes_is_doubtful(watch: Nursery, made: str) -> None:
    run = watch(ALONE.replace("copy.deepcopy(model)", made).replace(COPY, "pass"))
    assert (run.diagnosis.verdict, run.causes) == ("unknown", [])
    assert "`target`, which computes the targets" in run.diagnosis.summary
    assert "has not changed in 150 steps: copy the trained weights" in run.diagnosis.summary


def test_the_target_network_of_a_critic_beside_an_actor_is_recognised(watch: Nursery) -> None:
    run = watch(CRITIC.replace("target.load_state_dict(critic.state_dict())", "pass"))
    assert "`target`, which computes the targets" in run.diagnosis.summary


def test_a_teacher_of_the_same_shape_that_was_trained_before_may_stay(watch: Nursery) -> None:
    teach = "made = {k: v * 1.1 for k, v in target.state_dict().items()}\ntarget.load_state_dict(made)\n"
    script = ALONE.replace("optimizer = torch", teach + "optimizer = torch").replace(COPY, "pass")
    assert "which computes the targets" not in watch(script).diagnosis.summary
