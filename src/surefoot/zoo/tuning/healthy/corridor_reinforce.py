"""REINFORCE with a running baseline on a small grid world."""

import random
import sys

import torch
from torch import nn
from torch.distributions import Categorical

SIZE, MAX_STEPS = 5, 24
MOVES = [(0, 1), (0, -1), (1, 0), (-1, 0)]


class Grid:
    def reset(self):
        self.pos = (random.randrange(2), random.randrange(2))
        self.t = 0
        return self.observe()

    def observe(self):
        obs = torch.zeros(SIZE * SIZE)
        obs[self.pos[0] * SIZE + self.pos[1]] = 1.0
        return obs

    def step(self, action):
        dx, dy = MOVES[action]
        self.pos = (min(max(self.pos[0] + dx, 0), SIZE - 1), min(max(self.pos[1] + dy, 0), SIZE - 1))
        self.t += 1
        goal = self.pos == (SIZE - 1, SIZE - 1)
        return self.observe(), (1.0 if goal else -0.04), goal or self.t >= MAX_STEPS


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    random.seed(seed)
    torch.manual_seed(seed)
    env = Grid()
    policy = nn.Sequential(nn.Linear(SIZE * SIZE, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    baseline, gamma = 0.0, 0.97
    recent = []

    for update in range(70):
        log_probs, returns, entropies, scores = [], [], [], []
        for _ in range(4):
            obs, rewards, done = env.reset(), [], False
            while not done:
                dist = Categorical(logits=policy(obs))
                action = dist.sample()
                log_probs.append(dist.log_prob(action))
                entropies.append(dist.entropy())
                obs, reward, done = env.step(action.item())
                rewards.append(reward)
            scores.append(sum(rewards))
            g, episode = 0.0, []
            for r in reversed(rewards):
                g = r + gamma * g
                episode.append(g)
            returns.extend(reversed(episode))
        returns = torch.tensor(returns)
        advantage = returns - baseline
        baseline = 0.9 * baseline + 0.1 * returns.mean().item()
        loss = -(torch.stack(log_probs) * advantage).mean() - 0.01 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recent.append(sum(scores) / len(scores))
        if update % 20 == 0:
            mean_recent = sum(recent[-10:]) / len(recent[-10:])
            print(f"update {update:3d}  loss {loss.item():+.4f}  score {mean_recent:+.3f}")
    print(f"score over the last 10 updates: {sum(recent[-10:]) / 10:+.3f}")


main()
