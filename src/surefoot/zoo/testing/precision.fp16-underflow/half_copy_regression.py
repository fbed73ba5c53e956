"""Half-precision working copy of a small net, full-precision weights for the update."""

import copy
import sys

import torch
from torch import nn

LOSS_SCALE = 1.0


def sync(working, master):
    with torch.no_grad():
        for w, m in zip(working.parameters(), master.parameters()):
            w.copy_(m.half())


def main(seed):
    torch.manual_seed(seed)
    master = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 80))
    working = copy.deepcopy(master).half()
    optimizer = torch.optim.Adam(master.parameters(), lr=2e-3)
    teacher = torch.randn(16, 80) / 4
    for step in range(201):
        x = torch.randn(128, 16)
        y = torch.tanh(x @ teacher)
        out = working(x.half()).float()
        loss = (0.01 * (out - y)).square().mean()
        working.zero_grad()
        (loss * LOSS_SCALE).backward()
        for w, m in zip(working.parameters(), master.parameters()):
            m.grad = w.grad.float() / LOSS_SCALE
        optimizer.step()
        sync(working, master)
        if step % 50 == 0:
            print(f"step {step:3d} loss {loss.item():.3e} (baseline {1e-4 * y.var().item():.3e})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 113)
