"""Mixture of smooth gates for a two-dimensional surface."""

import argparse

import numpy as np
import torch


class Gates(torch.nn.Module):
    def __init__(self, n, steepness):
        super().__init__()
        self.direction = torch.nn.Parameter(torch.randn(n, 2))
        self.offset = torch.nn.Parameter(torch.randn(n) * 0.5)
        self.mix = torch.nn.Linear(n, n)
        self.height = torch.nn.Linear(n, 1)
        self.steepness = steepness

    def forward(self, x):
        gate = torch.sigmoid(self.steepness * (x @ self.direction.t() + self.offset))
        gate = torch.sigmoid(self.steepness * self.mix(gate - 0.5))
        return self.height(gate - 0.5)[:, 0]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("seed", nargs="?", type=int, default=90)
    ap.add_argument("--steepness", type=float, default=200.0)
    args = ap.parse_args()
    rng = np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)
    x = rng.uniform(-1.5, 1.5, (1500, 2)).astype("float32")
    z = np.sin(2 * x[:, 0]) * np.cos(1.5 * x[:, 1]) + 0.4 * x[:, 1]
    x, z = torch.from_numpy(x), torch.from_numpy(z.astype("float32"))
    net = Gates(32, args.steepness)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for epoch in range(14):
        order = rng.permutation(1500)
        losses = []
        for k in range(0, 1500, 50):
            rows = torch.from_numpy(order[k : k + 50])
            loss = torch.nn.functional.mse_loss(net(x[rows]), z[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        if epoch % 2 == 1:
            print(f"epoch {epoch + 1:2d} mse {np.mean(losses):.4f}")


if __name__ == "__main__":
    main()
