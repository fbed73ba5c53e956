"""Advantage actor-critic in a corridor: a small coin at the left end, the exit at the right end."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

LENGTH, HORIZON = 7, 14


class Corridor:
    def __init__(self, n):
        self.position = torch.full((n,), 2)

    def step(self, action):
        self.position = (self.position + 2 * action - 1).clamp(0, LENGTH - 1)
        reward = torch.where(self.position == LENGTH - 1, 1.0, 0.0)
        return reward + torch.where(self.position == 0, 0.1, 0.0)

    def observe(self):
        return F.one_hot(self.position, LENGTH).float()


class ActorCritic(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature
        self.body = nn.Sequential(nn.Linear(LENGTH, 32), nn.Tanh())
        self.actor = nn.Linear(32, 2)
        self.critic = nn.Linear(32, 1)

    def forward(self, obs):
        h = self.body(obs)
        return torch.distributions.Categorical(logits=self.actor(h) / self.temperature), self.critic(h).squeeze(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=12)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--entropy-coef", type=float, default=0.01)
    parser.add_argument("--temperature", type=float, default=0.01)
    parser.add_argument("--gamma", type=float, default=0.95)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    net = ActorCritic(args.temperature)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for update in range(1, args.updates + 1):
        env = Corridor(args.envs)
        log_probs, values, rewards, entropies = [], [], [], []
        for _ in range(HORIZON):
            dist, value = net(env.observe())
            action = dist.sample()
            rewards.append(env.step(action))
            log_probs.append(dist.log_prob(action))
            values.append(value)
            entropies.append(dist.entropy())
        returns, running = [], torch.zeros(args.envs)
        for reward in reversed(rewards):
            running = reward + args.gamma * running
            returns.insert(0, running)
        returns, values = torch.stack(returns), torch.stack(values)
        advantage = (returns - values).detach()
        policy_loss = -(torch.stack(log_probs) * advantage).mean()
        value_loss = F.mse_loss(values, returns)
        entropy = torch.stack(entropies).mean()
        loss = policy_loss + 0.5 * value_loss - args.entropy_coef * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        if update % 10 == 0:
            score = torch.stack(rewards).sum(0).mean().item()
            print(f"update {update} score {score:.2f} entropy {entropy.item():.4f} value loss {value_loss.item():.4f}")


if __name__ == "__main__":
    main()
