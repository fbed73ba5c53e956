"""Proximal policy optimisation for a one-step reaching task."""

import sys

import torch
import torch.nn as nn
from torch.distributions import Normal

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 2
torch.manual_seed(seed)


class GaussianPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2))
        self.log_std = nn.Parameter(torch.zeros(2) - 0.5)

    def forward(self, goal):
        return Normal(self.net(goal), self.log_std.exp())


def reward_of(goal, action):
    target = torch.stack([goal[:, 0] + goal[:, 2], goal[:, 1] - goal[:, 2]], 1)
    return -(action - target).norm(dim=1)


policy = GaussianPolicy()
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
for iteration in range(1, 31):
    goal = torch.randn(128, 3)
    with torch.no_grad():
        behaviour = policy(goal)
        action = behaviour.sample()
        old_log_prob = behaviour.log_prob(action).sum(1)
        reward = reward_of(goal, action)
        advantage = (reward - reward.mean()) / reward.std()
    largest = 0.0
    for epoch in range(25):
        ratio = torch.exp(policy(goal).log_prob(action).sum(1) - old_log_prob)
        loss = -(ratio * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        largest = max(largest, ratio.max().item())
    if iteration % 3 == 0:
        print(f"iteration {iteration} reward {reward.mean().item():.3f} loss {loss.item():.3f} max ratio {largest:.2f}")
