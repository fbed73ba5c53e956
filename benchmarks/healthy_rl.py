"""Healthy reinforcement learning: losses that cross zero, grow with success, or stay at 0 until the first reward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_loops import Batch, Learner, Run


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


def value_after_first_success(seed: int, steps: int) -> list[Learner]:
    """A critic of a random walk that pays 100 at the far end: its loss is almost 0 until the first success."""
    generator, net = torch.Generator().manual_seed(seed), _mlp(12, 32, 1)
    at = torch.zeros(4, dtype=torch.long)

    def batch() -> Batch:
        right = torch.rand(4, generator=generator) < 0.6
        after = (at + torch.where(right, 1, -1)).clamp(0, 11)
        done = after == 11
        with torch.no_grad():
            goal = 100.0 * done + 0.9 * net(F.one_hot(after, 12).float())[:, 0] * ~done
        states = F.one_hot(at, 12).float()
        at.copy_(torch.where(done, 0, after))
        return states, goal

    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    return [Learner(net, optimizer, batch, lambda states, goal: F.mse_loss(net(states)[:, 0], goal))]


def dqn_large_rewards(seed: int, steps: int) -> list[Learner]:
    """Q-learning on a grid with rewards of 10 and -10 and a target network that is copied every 60 steps."""
    generator, net, target = torch.Generator().manual_seed(seed), _mlp(25, 48, 4), _mlp(25, 48, 4)
    target.load_state_dict(net.state_dict())
    moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
    memory: list[tuple[int, int, float, int, bool]] = []
    place = {"row": 0, "column": 0, "steps": 0}

    def act() -> None:
        at = 5 * place["row"] + place["column"]
        with torch.no_grad():
            best = int(net(F.one_hot(torch.tensor(at), 25).float()).argmax())
        explore = torch.rand((), generator=generator) < max(0.1, 1 - place["steps"] / 400)
        action = int(torch.randint(4, (), generator=generator)) if explore else best
        row = min(max(place["row"] + int(moves[action, 0]), 0), 4)
        column = min(max(place["column"] + int(moves[action, 1]), 0), 4)
        won, lost = (row, column) == (4, 4), (row, column) == (2, 2)
        memory.append((at, action, 10.0 * won - 10.0 * lost - 0.1, 5 * row + column, won or lost))
        del memory[:-3000]
        place["row"], place["column"] = (0, 0) if won or lost else (row, column)

    def batch() -> Batch:
        for _ in range(3):
            act()
        place["steps"] += 1
        if place["steps"] % 60 == 0:
            target.load_state_dict(net.state_dict())
        rows = torch.randint(len(memory), (16,), generator=generator).tolist()
        at, action, reward, after, done = (torch.tensor(part) for part in zip(*(memory[i] for i in rows), strict=True))
        with torch.no_grad():
            goal = reward + 0.97 * target(F.one_hot(after, 25).float()).max(1).values * ~done
        return F.one_hot(at, 25).float(), action, goal

    def loss(states: Tensor, actions: Tensor, goal: Tensor) -> Tensor:
        return F.mse_loss(net(states).gather(1, actions[:, None])[:, 0], goal)

    return [Learner(net, torch.optim.Adam(net.parameters(), 2e-3), batch, loss)]


def bandit_that_changes(seed: int, steps: int) -> list[Learner]:
    """A policy gradient with entropy on a bandit whose arms are shuffled every fifth of the run."""
    generator = torch.Generator().manual_seed(seed)
    policy, calls, mean = nn.Linear(1, 8), [0], torch.zeros(())
    pay = torch.linspace(-1, 1, 8)

    def batch() -> Batch:
        if calls[0] and calls[0] % max(steps // 5, 1) == 0:
            pay.copy_(pay[torch.randperm(8, generator=generator)])
        calls[0] += 1
        with torch.no_grad():
            arms = torch.multinomial(policy(torch.ones(1)).softmax(0), 16, True, generator=generator)
        reward = pay[arms] + 0.5 * torch.randn(16, generator=generator)
        advantage = reward - mean
        mean.lerp_(reward.mean(), 0.1)
        return arms, advantage

    def loss(arms: Tensor, advantage: Tensor) -> Tensor:
        logits = policy(torch.ones(1)).log_softmax(0)
        return -(logits[arms] * advantage).mean() + 0.1 * (logits.exp() * logits).sum()

    return [Learner(policy, torch.optim.Adam(policy.parameters(), 2e-2), batch, loss)]


def deterministic_policy_gradient(seed: int, steps: int) -> list[Learner]:
    """Actor and critic on a cart that must stop at 0: the critic's target moves with both."""
    generator = torch.Generator().manual_seed(seed)
    actor, critic = _mlp(2, 32, 1), _mlp(3, 32, 1)
    slow_actor, slow_critic = _mlp(2, 32, 1), _mlp(3, 32, 1)
    slow_actor.load_state_dict(actor.state_dict())
    slow_critic.load_state_dict(critic.state_dict())
    state, memory = torch.randn(2, generator=generator), list[Tensor]()

    @torch.no_grad()
    def replay() -> Batch:
        for _ in range(2):
            push = (actor(state)[0].tanh() + 0.3 * torch.randn((), generator=generator)).clamp(-1, 1)
            after = torch.stack([state[0] + 0.2 * state[1], state[1] + 0.3 * push])
            after = torch.randn(2, generator=generator) if after.norm() > 4 else after
            memory.append(torch.cat([state, push[None], -state.square().sum()[None], after]))
            state.copy_(after)
        del memory[:-2000]
        for slow, fast in ((slow_actor, actor), (slow_critic, critic)):
            for kept, weight in zip(slow.parameters(), fast.parameters(), strict=True):
                kept.lerp_(weight, 0.01)
        rows = torch.stack([memory[i] for i in torch.randint(len(memory), (32,), generator=generator).tolist()])
        after = rows[:, 4:]
        goal = rows[:, 3] + 0.95 * slow_critic(torch.cat([after, slow_actor(after).tanh()], 1))[:, 0]
        critic.zero_grad(set_to_none=True)
        return rows[:, :3], goal

    def states() -> Batch:
        picked = torch.randint(len(memory), (32,), generator=generator).tolist()
        return (torch.stack([memory[i][:2] for i in picked]),)

    def critic_loss(seen: Tensor, goal: Tensor) -> Tensor:
        return F.mse_loss(critic(seen)[:, 0], goal)

    def actor_loss(seen: Tensor) -> Tensor:
        return -critic(torch.cat([seen, actor(seen).tanh()], 1)).mean()

    return [
        Learner(critic, torch.optim.Adam(critic.parameters(), 2e-3), replay, critic_loss),
        Learner(actor, torch.optim.Adam(actor.parameters(), 5e-4), states, actor_loss),
    ]


def imitation_then_reward(seed: int, steps: int) -> list[Learner]:
    """A policy imitates for half of the run and then follows its rewards: another loss, another sign, another scale."""
    generator, policy, calls = torch.Generator().manual_seed(seed), _mlp(8, 32, 4), [0]
    best = torch.randn(8, 4, generator=generator)

    def batch() -> Batch:
        calls[0] += 1
        seen = torch.randn(32, 8, generator=generator)
        with torch.no_grad():
            taken = torch.multinomial(policy(seen).softmax(1), 1, generator=generator)[:, 0]
        right = (seen @ best).argmax(1)
        return seen, right, taken, (taken == right).float() * 5

    def loss(seen: Tensor, right: Tensor, taken: Tensor, reward: Tensor) -> Tensor:
        logits = policy(seen).log_softmax(1)
        if calls[0] <= steps // 2:
            return F.nll_loss(logits, right)
        return -(logits.gather(1, taken[:, None])[:, 0] * (reward - reward.mean())).mean()

    return [Learner(policy, torch.optim.Adam(policy.parameters(), 2e-3), batch, loss)]


REINFORCEMENT: tuple[Run, ...] = (
    reinforce_gridworld,
    ppo_growing_returns,
    dqn_sparse_reward,
    value_after_first_success,
    dqn_large_rewards,
    bandit_that_changes,
    deterministic_policy_gradient,
    imitation_then_reward,
)
