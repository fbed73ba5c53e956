"""Advantage actor-critic in many copies of a point-mass task at once."""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal


@dataclass
class Settings:
    envs: int = 32
    horizon: int = 16
    updates: int = 150
    gamma: float = 0.9
    lr: float = 3e-3
    entropy_weight: float = 1e-3


class PointMass:
    """Drive a damped mass to the origin. Reward is minus the distance."""

    def __init__(self, n):
        self.state = torch.zeros(n, 2)
        self.reset(torch.ones(n, dtype=torch.bool))

    def reset(self, which):
        fresh = torch.stack([torch.rand(len(which)) * 2 - 1, torch.zeros(len(which))], dim=1)
        self.state = torch.where(which.unsqueeze(1), fresh, self.state)

    def step(self, force):
        position, velocity = self.state.unbind(1)
        velocity = 0.7 * velocity + 0.3 * force.clamp(-1, 1)
        position = (position + 0.5 * velocity).clamp(-2, 2)
        self.state = torch.stack([position, velocity], dim=1)
        return -position.abs()


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.tensor([-0.5]))

    def forward(self, s):
        return Normal(self.actor(s).squeeze(-1), self.log_std.exp()), self.critic(s).squeeze(-1)


def main():
    cfg = Settings()
    torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
    env, agent = PointMass(cfg.envs), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=cfg.lr)
    for update in range(cfg.updates):
        log_probs, values, rewards, entropy = [], [], [], 0.0
        env.reset(torch.rand(cfg.envs) < 0.5)
        for _ in range(cfg.horizon):
            dist, value = agent(env.state)
            action = dist.sample()
            log_probs.append(dist.log_prob(action))
            values.append(value)
            rewards.append(env.step(action))
            entropy = entropy + dist.entropy().mean() / cfg.horizon
        with torch.no_grad():
            ret = agent(env.state)[1]
            returns = []
            for r in reversed(rewards):
                ret = r + cfg.gamma * ret
                returns.append(ret)
        returns = torch.stack(returns[::-1])
        values, log_probs = torch.stack(values), torch.stack(log_probs)
        advantage = (returns - values).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        policy_loss = -(log_probs * advantage).mean()
        value_loss = F.mse_loss(values, returns)
        loss = policy_loss + 0.5 * value_loss - cfg.entropy_weight * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        if update % 25 == 0 or update == cfg.updates - 1:
            reward = torch.stack(rewards).mean().item()
            print(f"update {update:3d}  reward {reward:+.3f}  policy {policy_loss.item():+.3f}  value {value_loss:.3f}")


if __name__ == "__main__":
    main()
