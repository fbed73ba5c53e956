"""Same-class verification with a shared encoder and a small comparison head."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def make_points(n, rng):
    label = rng.integers(0, 4, n)
    radius = 0.5 + label + 0.1 * rng.normal(size=n)
    angle = rng.uniform(0, 2 * np.pi, n)
    xy = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1) / 2.0
    return torch.tensor(xy, dtype=torch.float32), torch.tensor(label)


class PairNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.offset = nn.Parameter(torch.tensor(1.0))

    def embed(self, x):
        return torch.tensor(self.encoder(x).tolist())

    def forward(self, a, b):
        gap = (self.embed(a) - self.embed(b)).pow(2).sum(-1)
        return self.offset - F.softplus(self.scale) * gap


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=17)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)

    points, label = make_points(1200, rng)
    test_points, test_label = make_points(600, rng)
    net = PairNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)

    def pairs(labels):
        left = rng.integers(0, len(labels), 128)
        right = rng.integers(0, len(labels), 128)
        return left, right, (labels[left] == labels[right]).float()

    for step in range(args.steps):
        i, j, same = pairs(label)
        logits = net(points[i], points[j])
        loss = F.binary_cross_entropy_with_logits(logits, same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 80 == 0:
            print(f"{step:4d} bce {loss.item():.4f}")

    with torch.no_grad():
        i, j, same = pairs(test_label)
        hit = ((net(test_points[i], test_points[j]) > 0).float() == same).float().mean()
    print(f"pair accuracy {hit.item():.3f} (base rate {1 - same.mean().item():.3f})")


if __name__ == "__main__":
    main()
