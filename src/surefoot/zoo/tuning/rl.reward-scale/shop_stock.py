"""Actor-critic that decides how much to order for a small shop."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 39)

SHOPS, DAYS, ORDERS = 16, 12, 5


def day(stock, order):
    stock = (stock + order).clamp(max=8)
    demand = torch.poisson(torch.full_like(stock, 2.0))
    sold = torch.minimum(stock, demand)
    profit = 1900.0 * sold - 500.0 * order - 400.0 * (stock - sold)
    return stock - sold, profit


class Manager(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.policy = nn.Linear(32, ORDERS)
        self.value = nn.Linear(32, 1)

    def forward(self, stock):
        h = self.trunk(stock[:, None] / 4 - 1)
        return Categorical(logits=self.policy(h)), self.value(h)[:, 0]


manager = Manager()
optimizer = torch.optim.Adam(manager.parameters(), lr=3e-3)
for update in range(1, 121):
    stock = torch.randint(0, 5, (SHOPS,)).float()
    log_probs, values, profits, entropy = [], [], [], 0.0
    for _ in range(DAYS):
        dist, value = manager(stock)
        order = dist.sample()
        stock, profit = day(stock, order.float())
        log_probs.append(dist.log_prob(order))
        values.append(value)
        profits.append(profit)
        entropy = entropy + dist.entropy().mean() / DAYS
    returns, running = [], torch.zeros(SHOPS)
    for profit in reversed(profits):
        running = profit + 0.8 * running
        returns.append(running)
    returns, values = torch.stack(returns[::-1]), torch.stack(values)
    advantage = (returns - values).detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = -(torch.stack(log_probs) * advantage).mean()
    value_loss = F.mse_loss(values, returns)
    loss = policy_loss + 0.5 * value_loss - 0.01 * entropy
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(manager.parameters(), 0.5)
    optimizer.step()
    if update % 12 == 0:
        print(
            f"update {update} profit per day {torch.stack(profits).mean().item():.1f} "
            f"policy loss {policy_loss.item():.4f} value loss {value_loss.item():.1f}"
        )
