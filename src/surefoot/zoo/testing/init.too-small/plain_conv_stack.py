"""Orientation of noisy bars, plain convolution stack."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class Stack(nn.Module):
    def __init__(self, channels=12, depth=4, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.body = nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1) for _ in range(depth)])
        self.head = nn.Linear(channels * 4, classes)
        for conv in [self.stem, *self.body]:
            nn.init.normal_(conv.weight, std=0.01)
            nn.init.zeros_(conv.bias)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for i, conv in enumerate(self.body):
            x = F.relu(conv(x))
            if i == 1:
                x = F.max_pool2d(x, 2)
        return self.head(F.adaptive_max_pool2d(x, 2).flatten(1))


def bars(n, gen):
    cls = torch.randint(0, 4, (n,), generator=gen)
    grid = torch.linspace(-1, 1, 10)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    theta = cls * math.pi / 4 + 0.1 * torch.randn(n, generator=gen)
    shift = 0.3 * torch.randn(n, generator=gen)
    distance = theta.cos()[:, None, None] * xx + theta.sin()[:, None, None] * yy - shift[:, None, None]
    image = torch.exp(-8 * distance**2) * 2 - 0.5
    return (image + 0.2 * torch.randn(n, 10, 10, generator=gen)).unsqueeze(1), cls


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("seed", nargs="?", type=int, default=64)
    opts = ap.parse_args()
    torch.manual_seed(opts.seed)
    gen = torch.Generator().manual_seed(opts.seed)
    net = Stack()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for step in range(1, 201):
        images, target = bars(32, gen)
        loss = F.cross_entropy(net(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4d} | loss {loss.item():.4f}")
    with torch.no_grad():
        images, target = bars(400, gen)
        print("accuracy", round((net(images).argmax(1) == target).float().mean().item(), 3))
