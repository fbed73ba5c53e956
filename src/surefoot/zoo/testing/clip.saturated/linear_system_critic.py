"""Value estimates for a noisy linear system, with a target network."""

import copy
import sys

import torch
from torch import nn


def rollout(n, generator):
    state = torch.randn(n, 4, generator=generator)
    drift = torch.tensor([[0.9, 0.2, 0, 0], [-0.2, 0.9, 0, 0], [0, 0, 0.8, 0.1], [0, 0, 0, 0.7]])
    following = state @ drift.t() + 0.1 * torch.randn(n, 4, generator=generator)
    reward = 1.0 - state[:, 0].abs() + 0.5 * state[:, 2]
    return state, reward, following


def polyak(target, online, rate):
    with torch.no_grad():
        for t, o in zip(target.parameters(), online.parameters()):
            t.lerp_(o, rate)


def main(seed):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    target = copy.deepcopy(critic)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9)
    gamma, errors = 0.8, []
    for step in range(1, 501):
        state, reward, following = rollout(64, generator)
        with torch.no_grad():
            backup = reward + gamma * target(following).squeeze(-1)
        error = critic(state).squeeze(-1) - backup
        loss = 0.5 * error.square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(critic.parameters(), 2e-5)
        optimizer.step()
        polyak(target, critic, 0.05)
        errors.append(loss.item())
        if step % 100 == 0:
            print(f"step {step}: td loss {sum(errors[-100:]) / 100:.4f}, mean value {backup.mean().item():.2f}")


main(int(sys.argv[1]) if len(sys.argv) > 1 else 88)
