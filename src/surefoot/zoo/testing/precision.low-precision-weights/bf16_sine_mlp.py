"""Curve fit, everything in bfloat16 to save memory."""

import argparse
import math

import torch
from torch import nn


class SineNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        self.register_buffer("freq", torch.arange(1, 5) * math.pi / 2)

    def forward(self, t):
        angle = t * self.freq
        h = torch.cat([angle.sin(), angle.cos()], dim=-1)
        h = torch.nn.functional.silu(self.inp(h))
        h = torch.nn.functional.silu(self.mid(h))
        return self.out(h)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=29)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=1200)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    net = SineNet(64).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.0)
    for step in range(args.steps):
        t = torch.rand(64, 1) * 4 - 2
        target = torch.sin(3 * t) * torch.exp(-t.abs()) * 2
        loss = (net(t.to(dtype)).float() - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 150 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  mse {loss.item():.4f}")


if __name__ == "__main__":
    main()
