import math
import sys

import torch
import torch.nn as nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 9
torch.manual_seed(seed)

t = math.pi * torch.rand(1000)
side = torch.randint(0, 2, (1000,))
moon_x = torch.where(side == 0, t.cos(), 1 - t.cos())
moon_y = torch.where(side == 0, t.sin(), 0.5 - t.sin())
points = torch.stack([moon_x, moon_y], 1) + 0.08 * torch.randn(1000, 2)
points = (points - points.mean(0)) / points.std(0)


def weight_init(m):
    if isinstance(m, nn.Linear):
        m.weight.data.fill_(0.1)
        m.bias.data.fill_(0.0)


model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
model.apply(weight_init)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
bce = nn.BCEWithLogitsLoss()

for epoch in range(16):
    for rows in torch.randperm(1000).split(50):
        optimizer.zero_grad()
        loss = bce(model(points[rows])[:, 0], side[rows].float())
        loss.backward()
        optimizer.step()
    if epoch % 3 == 0:
        with torch.no_grad():
            logit = model(points)[:, 0]
        acc = ((logit > 0).long() == side).float().mean().item()
        print(f"epoch {epoch:2d} loss {bce(logit, side.float()).item():.4f} acc {acc:.3f}")
