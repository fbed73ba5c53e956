"""Healthy reinforcement learning: losses that cross zero, grow with success, or stay at 0 until the first reward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_loops import Batch, Learner


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def reinforce_gridworld(seed: int, steps: int) -> list[Learner]:
    """REINFORCE with a running baseline on a 4 x 4 grid: the loss crosses zero all the time."""
    generator = torch.Generator().manual_seed(seed)
    policy = _mlp(16, 32, 4)
    moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
    baseline = torch.zeros(16)

    def rollout() -> Batch:
        where = torch.zeros(16, 2, dtype=torch.long)
        states, actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(16):
                state = F.one_hot(where[:, 0] * 4 + where[:, 1], 16).float()
                action = torch.multinomial(policy(state).softmax(1), 1, generator=generator)[:, 0]
                there = (where == 3).all(1)
                where = torch.where(there[:, None], where, (where + moves[action]).clamp(0, 3))
                states.append(state)
                actions.append(action)
                rewards.append((where == 3).all(1).float() - 0.1)
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        advantage = returns - baseline[:, None]
        baseline.mul_(0.95).add_(0.05 * returns.mean(1))
        return torch.cat(states), torch.cat(actions), advantage.flatten()

    def loss(states: Tensor, actions: Tensor, advantage: Tensor) -> Tensor:
        logits = policy(states).log_softmax(1)
        return -(logits.gather(1, actions[:, None])[:, 0] * advantage).mean()

    return [Learner(policy, torch.optim.Adam(policy.parameters(), 5e-3), rollout, loss)]


class _ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = _mlp(10, 32, 2), _mlp(10, 32, 1)


def ppo_growing_returns(seed: int, steps: int) -> list[Learner]:
    """PPO on a chain that pays its position: returns, and so the value loss, grow as the policy gets better."""
    generator = torch.Generator().manual_seed(seed)
    model = _ActorCritic()
    stored: list[Batch] = []

    def rollout() -> Batch:
        where = torch.zeros(16, dtype=torch.long)
        states, actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(24):
                state = F.one_hot(where, 10).float()
                action = torch.multinomial(model.actor(state).softmax(1), 1, generator=generator)[:, 0]
                slip = torch.rand(16, generator=generator) < 0.1
                where = (where + torch.where(slip, -1, 2 * action - 1)).clamp(0, 9)
                states.append(state)
                actions.append(action)
                rewards.append(where.float())
            returns, total = [], torch.zeros(16)
            for reward in reversed(rewards):
                total = reward + 0.95 * total
                returns.append(total)
            flat, chosen, target = torch.cat(states), torch.cat(actions), torch.cat(returns[::-1])
            advantage = target - model.critic(flat)[:, 0]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            before = model.actor(flat).log_softmax(1).gather(1, chosen[:, None])[:, 0]
        return flat, chosen, target, advantage, before

    def batch() -> Batch:
        if not stored:
            whole = rollout()
            for _ in range(4):
                rows = torch.randperm(384, generator=generator).view(4, 96)
                stored.extend(tuple(part[row] for part in whole) for row in rows)
        return stored.pop(0)

    def loss(states: Tensor, actions: Tensor, target: Tensor, advantage: Tensor, before: Tensor) -> Tensor:
        logits = model.actor(states).log_softmax(1)
        ratio = (logits.gather(1, actions[:, None])[:, 0] - before).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        entropy = -(logits.exp() * logits).sum(1).mean()
        return -surrogate + 0.5 * F.mse_loss(model.critic(states)[:, 0], target) - 0.01 * entropy

    return [Learner(model, torch.optim.Adam(model.parameters(), 3e-3), batch, loss)]


def dqn_sparse_reward(seed: int, steps: int) -> list[Learner]:
    """Q-learning with replay and a target network; nothing but zeros until the first reward is found."""
    generator = torch.Generator().manual_seed(seed)
    net, target = _mlp(16, 32, 2), _mlp(16, 32, 2)
    with torch.no_grad():
        net[2].weight.zero_()
        net[2].bias.zero_()
    target.load_state_dict(net.state_dict())
    memory: list[tuple[int, int, float, int, bool]] = []
    place = {"at": 0, "steps": 0}

    def act() -> None:
        at = place["at"]
        with torch.no_grad():
            values = net(F.one_hot(torch.tensor([at]), 16).float())[0]
        random = torch.rand((), generator=generator) < 0.3 or values[0] == values[1]
        action = int(torch.randint(2, (), generator=generator)) if random else int(values.argmax())
        after = min(max(at + 2 * action - 1, 0), 15)
        done = after == 15
        memory.append((at, action, float(done), after, done))
        del memory[:-2000]
        place["at"] = 0 if done else after

    def batch() -> Batch:
        for _ in range(4):
            act()
        place["steps"] += 1
        if place["steps"] % 100 == 0:
            target.load_state_dict(net.state_dict())
        rows = torch.randint(len(memory), (32,), generator=generator).tolist()
        at, action, reward, after, done = (torch.tensor(part) for part in zip(*(memory[i] for i in rows), strict=True))
        with torch.no_grad():
            best = target(F.one_hot(after, 16).float()).max(1).values
        goal = reward + 0.95 * best * ~done
        return F.one_hot(at, 16).float(), action, goal

    def loss(states: Tensor, actions: Tensor, goal: Tensor) -> Tensor:
        return F.smooth_l1_loss(net(states).gather(1, actions[:, None])[:, 0], goal)

    return [Learner(net, torch.optim.Adam(net.parameters(), 1e-3), batch, loss)]
