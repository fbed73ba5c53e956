"""Predict turbine output from the weather mast."""

import sys

import numpy as np
import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 77
torch.manual_seed(seed)
rng = np.random.default_rng(seed)


def mast(n, site):
    wind = rng.weibull(2.0, n) * 8  # m/s
    temp = rng.normal(11, 7, n)  # Celsius
    pressure = rng.normal(1013, 9, n)  # hPa
    power = np.clip(wind / 12, 0, 1) ** 3 * (pressure / 1013) * (288 / (277 + temp)) + 0.02 * rng.normal(size=n)
    if site == "ridge":
        wind, temp, pressure = wind * 2.237, temp * 1.8 + 32, pressure * 0.02953
    return np.stack([wind, temp, pressure], 1), power


train_x, train_y = mast(1500, site="coast")
val_x, val_y = mast(400, site="coast")
mean, std = train_x.mean(0), train_x.std(0)


def tensors(x, y):
    return torch.tensor((x - mean) / std, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


train_x, train_y = tensors(train_x, train_y)
val_x, val_y = tensors(val_x, val_y)


class Plant(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 32), nn.Linear(32, 32), nn.Linear(32, 1)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = nn.functional.silu(layer(x))
        return self.layers[-1](x)[:, 0]


plant = Plant()
optimizer = torch.optim.AdamW(plant.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
for step in range(400):
    rows = torch.randint(len(train_x), (64,))
    loss = nn.functional.huber_loss(plant(train_x[rows]), train_y[rows], delta=0.2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 50 == 49:
        with torch.no_grad():
            rmse = (plant(val_x) - val_y).square().mean().sqrt().item()
            train_rmse = (plant(train_x) - train_y).square().mean().sqrt().item()
        print(f"step {step + 1} loss {loss.item():.5f} train rmse {train_rmse:.3f} val rmse {rmse:.3f}")
