"""Cubic fit with bootstrap batches."""

import argparse

import numpy as np
import torch
from torch import nn


class Cubic(nn.Module):
    def __init__(self):
        super().__init__()
        self.coefficients = nn.Parameter(torch.randn(4) * 0.1)

    def forward(self, x):
        return torch.stack([x**k for k in range(4)], -1) @ self.coefficients


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=42)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    x = np.random.uniform(-1.5, 1.5, 300).astype("float32")
    y = 0.5 - x + 0.8 * x**3 + np.random.normal(0, 0.1, 300).astype("float32")
    model = Cubic()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(args.steps):
        rows = np.random.choice(300, 32)
        loss = (model(torch.from_numpy(x[rows])) - torch.from_numpy(y[rows])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 80 == 0:
            print(f"step {step} seed {args.seed} mse {loss.item():.5f}")
    print("coefficients", [round(c, 4) for c in model.coefficients.tolist()])


if __name__ == "__main__":
    main()
