"""Forecast the next reading of a plant sensor from the last day of readings."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def make_readings(n, rng):
    t = np.arange(n)
    load = np.sin(2 * np.pi * t / 24) + 0.4 * np.sin(2 * np.pi * t / 168) + 0.1 * rng.standard_normal(n)
    temp = np.cos(2 * np.pi * t / 24) + 0.1 * rng.standard_normal(n)
    for start in rng.integers(100, n - 100, size=2):
        load[start : start + 3] = np.nan
    return np.stack([load, temp], axis=1).astype(np.float32)


class Windows(Dataset):
    def __init__(self, readings, length=24):
        self.readings = torch.from_numpy(readings)
        self.length = length

    def __len__(self):
        return len(self.readings) - self.length

    def __getitem__(self, i):
        return self.readings[i : i + self.length], self.readings[i + self.length, 0]


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.gru = nn.GRU(2, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.gru(x)
        return self.head(out[:, -1]).squeeze(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    readings = make_readings(1700, rng)
    loader = DataLoader(Windows(readings), batch_size=16, shuffle=True)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    for epoch in range(args.epochs):
        for window, target in loader:
            loss = nn.functional.mse_loss(model(window), target)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 25 == 0:
                print(f"step {step:4d} mse {loss.item():.4f}")
            step += 1
    print("final mse", round(loss.item(), 4))


if __name__ == "__main__":
    main()
