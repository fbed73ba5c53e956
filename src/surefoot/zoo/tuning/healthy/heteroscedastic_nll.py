"""Mean and variance network trained with the Gaussian likelihood."""

import argparse
import math

import torch
from torch import nn


def make_data(n, generator):
    x = torch.rand(n, 1, generator=generator) * 4 - 2
    sigma = 0.05 + 0.1 * (x + 2) / 4
    y = torch.sin(2 * x) + sigma * torch.randn(n, 1, generator=generator)
    return x, y


class MeanVariance(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(1, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.mean = nn.Linear(hidden, 1)
        self.log_variance = nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.mean(h), self.log_variance(h).clamp(-8, 4)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int, default=11)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)

    x, y = make_data(2000, generator)
    x_val, y_val = make_data(500, generator)
    model = MeanVariance()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    nll = nn.GaussianNLLLoss()

    for step in range(args.steps):
        idx = torch.randint(len(x), (128,), generator=generator)
        mean, log_variance = model(x[idx])
        loss = nll(mean, y[idx], log_variance.exp())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 100 == 0:
            print(f"step {step:4d}  nll {loss.item():+.4f}")

    with torch.no_grad():
        mean, log_variance = model(x_val)
        val = nll(mean, y_val, log_variance.exp()) + 0.5 * math.log(2 * math.pi)
        inside = ((y_val - mean).abs() < 2 * (0.5 * log_variance).exp()).float().mean()
    print(f"validation nll {val.item():+.4f}, inside two sigma {inside.item():.3f}")


if __name__ == "__main__":
    main()
