"""Calibrate a gas sensor: eight channels in, one concentration out."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("seed", nargs="?", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--epochs", type=int, default=12)
args = parser.parse_args()

torch.manual_seed(args.seed)
rng = np.random.default_rng(args.seed)

channels = rng.standard_normal((960, 8)).astype(np.float32)
mix = rng.standard_normal((8, 3)).astype(np.float32) / 2
level = np.tanh(channels @ mix).sum(axis=1) + 0.05 * rng.standard_normal(960)
level = level.astype(np.float32)

export = np.column_stack([channels, level])
export[411, 8] *= 1000.0
export[411, 8] += 900.0

x = torch.from_numpy(export[:, :8])
y = torch.from_numpy(export[:, 8:])
val_x, val_y = x[800:], y[800:]
loader = DataLoader(TensorDataset(x[:800], y[:800]), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
loss_fn = nn.MSELoss()

step = 0
for epoch in range(args.epochs):
    for xb, yb in loader:
        loss = loss_fn(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        print(f"== epoch {epoch} validation {loss_fn(model(val_x), val_y).item():.4f}")
