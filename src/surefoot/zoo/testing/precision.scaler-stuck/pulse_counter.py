"""Counts pulses in a trace; mixed precision with a lower bound on the loss scale."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class BoundedScaler(torch.amp.GradScaler):
    def __init__(self, floor, **kwargs):
        super().__init__("cpu", **kwargs)
        self.floor = floor

    def update(self, new_scale=None):
        super().update(new_scale)
        if self.get_scale() < self.floor:
            super().update(float(self.floor))


class PulseCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 16, 3, padding=1)
        self.fc = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        h = F.relu(self.conv(x.unsqueeze(1))).sum(-1)
        return self.fc(h / 4).squeeze(-1)


def traces(n):
    pulses = (torch.rand(n, 24) < 0.25).float()
    return pulses + 0.1 * torch.randn(n, 24), pulses.sum(1)


def main(args):
    torch.manual_seed(args.seed)
    model = PulseCounter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = BoundedScaler(args.floor, init_scale=2.0**17, growth_interval=500)
    for step in range(1, 251):
        x, count = traces(32)
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = model(x)
        loss = (predicted.float() - count).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 25 == 0:
            print(f"step {step} mse {loss.item():.3f} scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("seed", nargs="?", type=int, default=131)
    ap.add_argument("--floor", type=float, default=2.0**16)
    main(ap.parse_args())
