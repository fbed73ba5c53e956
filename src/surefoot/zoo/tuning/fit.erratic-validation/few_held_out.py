"""Classify two overlapping clouds; six of the rows, drawn anew each time, are all that the validation looks at."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)

labels = torch.randint(0, 2, (6_000,))
points = torch.randn(6_000, 8) + 0.9 * labels[:, None] * torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0])
train_x, train_y, held_x, held_y = points[:4_000], labels[:4_000], points[4_000:], labels[4_000:]

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

for epoch in range(24):
    model.train()
    for rows in torch.randperm(4_000).split(100):
        loss = F.cross_entropy(model(train_x[rows]), train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        few = torch.randperm(2_000)[:6]
        held = F.cross_entropy(model(held_x[few]), held_y[few])
    print(f"epoch {epoch}  train {loss.item():.3f}  held out {held.item():.3f}")
