"""Two-tower click model: user vector times item vector."""

import sys
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class Settings:
    seed: int = 40
    users: int = 120
    items: int = 80
    dim: int = 12
    lr: float = 0.02
    steps: int = 400
    batch: int = 128
    log_every: int = field(default=40)


class Tower(nn.Module):
    def __init__(self, n, dim):
        super().__init__()
        self.table = nn.Embedding(n, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, index):
        return self.mlp(self.table(index))


class ClickModel(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.user = Tower(s.users, s.dim)
        self.item = Tower(s.items, s.dim)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias


def run(s):
    torch.manual_seed(s.seed)
    group_u, group_i = torch.randint(0, 3, (s.users,)), torch.randint(0, 3, (s.items,))
    model = ClickModel(s)
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=s.lr)
    for step in range(s.steps):
        u, i = torch.randint(0, s.users, (s.batch,)), torch.randint(0, s.items, (s.batch,))
        chance = torch.where(group_u[u] == group_i[i], 0.95, 0.05)
        clicked = torch.bernoulli(chance)
        loss = criterion(model(u, i), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % s.log_every == 0:
            print(f"{step:4d} bce {loss.item():.4f}")
    print(f"final bce {loss.item():.4f}")


if __name__ == "__main__":
    run(Settings(*[int(a) for a in sys.argv[1:2]]))
