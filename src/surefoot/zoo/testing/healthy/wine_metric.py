"""Metric learning on wine: rows of one cultivar close together, others a margin apart."""

import sys

import torch
from sklearn.datasets import load_wine
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 19)

wine = load_wine()
x = torch.tensor(wine.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
y = torch.tensor(wine.target)


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.f(x)


def distance(a, b):
    return torch.sqrt(((a - b) ** 2).sum(dim=-1) + 1e-8)


def contrastive_loss(a, b, same, margin=2.0):
    d = distance(a, b)
    return torch.where(same, d**2, torch.relu(margin - d) ** 2).mean()


model = Embedder()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(400):
    i = torch.randint(0, len(x), (24,))
    j = torch.randint(0, len(x), (24,))
    loss = contrastive_loss(model(x[i]), model(x[j]), y[i] == y[j])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

with torch.no_grad():
    z = model(x)
    gap = torch.cdist(z, z) + 1e6 * torch.eye(len(z))
    print("nearest neighbour accuracy", (y[gap.argmin(1)] == y).float().mean().item())
