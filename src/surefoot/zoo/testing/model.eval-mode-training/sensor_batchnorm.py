"""Deep classifier for offset sensor channels; a shape check precedes the training."""

import argparse
import math

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, channels, width=40, depth=6):
        super().__init__()
        layers = []
        for i in range(depth):
            layers.append(nn.Linear(channels if i == 0 else width, width, bias=False))
            layers.append(nn.BatchNorm1d(width))
            layers.append(nn.Sigmoid() if i % 2 else nn.ReLU())
        self.body = nn.Sequential(*layers)
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        return self.out(self.body(x))


def check_shapes(model, channels):
    model.eval()
    with torch.no_grad():
        assert model(torch.zeros(2, channels)).shape == (2, 2)


def readings(n, rng):
    phase = torch.rand(n, 1, generator=rng) * 2 * math.pi
    wave = torch.sin(phase + torch.arange(10) * 0.6) + 0.2 * torch.randn(n, 10, generator=rng)
    radius = wave.pow(2).mean(1)
    return wave, (wave[:, 0] * wave[:, 3] > 0.1 * radius).long()


def main(seed):
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    x, y = readings(2000, rng)
    model = Classifier(10)
    check_shapes(model, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(301):
        rows = torch.randint(0, 1600, (64,), generator=rng)
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        print("accuracy", (model(x[1600:]).argmax(1) == y[1600:]).float().mean().item())


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("seed", nargs="?", type=int, default=70)
    main(ap.parse_args().seed)
