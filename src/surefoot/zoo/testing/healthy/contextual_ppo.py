"""PPO with a clipped objective on a contextual game: say in which quadrant of a rotated plane a point lies."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
ACTIONS, CLIP, EPOCHS, MINIBATCH, ROLLOUT = 4, 0.2, 4, 64, 256


def contexts(n):
    obs = torch.randn(n, 2)
    u, v = obs[:, 0] + 0.5 * obs[:, 1], obs[:, 1] - 0.5 * obs[:, 0]
    return obs, 2 * (u > 0).long() + (v > 0).long()


body = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
pi, vf = nn.Linear(64, ACTIONS), nn.Linear(64, 1)
params = [*body.parameters(), *pi.parameters(), *vf.parameters()]
optimizer = torch.optim.Adam(params, lr=1e-3, eps=1e-5)

for iteration in range(35):
    with torch.no_grad():
        obs, right = contexts(ROLLOUT)
        h = body(obs)
        dist = Categorical(logits=pi(h))
        action = dist.sample()
        old_logp, value = dist.log_prob(action), vf(h).squeeze(1)
        reward = (action == right).float() + 0.3 * torch.randn(ROLLOUT)
        advantage = reward - value
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    kls = []
    for _ in range(EPOCHS):
        for rows in torch.randperm(ROLLOUT).split(MINIBATCH):
            h = body(obs[rows])
            dist = Categorical(logits=pi(h))
            logp = dist.log_prob(action[rows])
            ratio = (logp - old_logp[rows]).exp()
            adv = advantage[rows]
            surrogate = torch.min(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
            value_loss = F.mse_loss(vf(h).squeeze(1), reward[rows])
            loss = -surrogate + 0.5 * value_loss - 0.01 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(params, 0.5)
            optimizer.step()
            kls.append((old_logp[rows] - logp).mean().item())
    if iteration % 5 == 0 or iteration == 34:
        hit = (action == right).float().mean().item()
        print(f"iter {iteration:2d}  hit rate {hit:.3f}  loss {loss.item():+.4f}  kl {sum(kls) / len(kls):.4f}")
