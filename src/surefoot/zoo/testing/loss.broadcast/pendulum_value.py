"""Fit a value function for a swinging pendulum from Monte-Carlo returns."""

import math
import sys

import torch
import torch.nn.functional as F

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 16
torch.manual_seed(seed)


def rollout_returns(angle, speed, horizon=30, gamma=0.93, dt=0.08):
    total = torch.zeros_like(angle)
    for t in range(horizon):
        total += gamma**t * torch.cos(angle)
        speed = speed - dt * (9.0 * torch.sin(angle) + 0.2 * speed)
        angle = angle + dt * speed
    return total / 6


def layer(n_in, n_out):
    bound = 1 / math.sqrt(n_in)
    w = torch.empty(n_in, n_out).uniform_(-bound, bound)
    return [w.requires_grad_(), torch.zeros(n_out, requires_grad=True)]


params = layer(3, 48) + layer(48, 48) + layer(48, 1)


def value(state):
    w1, b1, w2, b2, w3, b3 = params
    h = F.silu(state @ w1 + b1)
    h = F.silu(h @ w2 + b2)
    return h @ w3 + b3


def huber(error, delta=1.0):
    size = error.abs()
    return torch.where(size < delta, 0.5 * size**2, delta * (size - 0.5 * delta)).mean()


def sample(n):
    angle = (torch.rand(n) * 2 - 1) * math.pi
    speed = torch.randn(n)
    state = torch.stack([angle.cos(), angle.sin(), speed / 2], dim=1)
    return state, rollout_returns(angle, speed)


optimizer = torch.optim.AdamW(params, lr=3e-3)
for step in range(300):
    state, ret = sample(64)
    loss = huber(value(state) - ret)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step:4d} huber {loss.item():.4f}")

with torch.no_grad():
    state, ret = sample(1000)
    corr = torch.corrcoef(torch.stack([value(state).flatten(), ret]))[0, 1].item()
print(f"correlation with the return {corr:.3f}")
