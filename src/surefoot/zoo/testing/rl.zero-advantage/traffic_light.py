"""REINFORCE for a traffic light that chooses which of two roads gets green."""

import sys

import numpy as np
import torch
from torch import nn, optim

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 46
torch.manual_seed(seed)
rng = np.random.default_rng(seed)


def run_episode(policy, steps=15):
    queues = rng.integers(0, 6, size=2).astype(np.float32)
    log_probs, rewards = [], []
    for _ in range(steps):
        dist = torch.distributions.Categorical(logits=policy(torch.from_numpy(queues / 5)))
        green = dist.sample()
        log_probs.append(dist.log_prob(green))
        before = queues.sum()
        queues[green.item()] = max(0, queues[green.item()] - 3)
        served = before - queues.sum()
        queues += rng.poisson(1.2, size=2)
        queues = np.minimum(queues, 12)
        rewards.append(served)
    return torch.stack(log_probs), torch.tensor(rewards, dtype=torch.float32)


def discounted(rewards, gamma=0.7):
    out, running = [], 0.0
    for r in reversed(rewards.tolist()):
        running = r + gamma * running
        out.append(running)
    return torch.tensor(out[::-1])


policy = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 2))
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
scores = []
for episode in range(1, 101):
    log_probs, rewards = run_episode(policy)
    returns = discounted(rewards).unsqueeze(1)
    baseline = returns.mean(dim=1, keepdim=True)
    advantage = (returns - baseline).squeeze(1)
    loss = -(log_probs * advantage).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scores.append(rewards.sum().item())
    if episode % 10 == 0:
        print(f"episode {episode} loss {loss.item():.4f} served per episode {np.mean(scores[-10:]):.2f}")
