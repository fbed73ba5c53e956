"""Shared trunk, one linear head per sensor."""

import argparse

import torch
from torch import nn

SENSORS = ("north", "south", "roof")


class SensorModel(nn.Module):
    def __init__(self, d_in, width):
        super().__init__()
        self.trunk = nn.Linear(d_in, width)
        self.gain = {name: torch.randn(width, requires_grad=True) for name in SENSORS}
        self.bias = nn.Parameter(torch.zeros(len(SENSORS)))

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        columns = [h @ self.gain[name] for name in SENSORS]
        return torch.stack(columns, dim=1) / h.shape[1] ** 0.5 + self.bias


def synthetic(n, rng):
    x = torch.randn(n, 7, generator=rng)
    w = torch.linspace(-1.5, 1.5, 21).reshape(7, 3)
    return x, 2.5 * torch.tanh(x @ w) + 0.05 * torch.randn(n, 3, generator=rng)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=61)
    seed = parser.parse_args().seed
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    x, y = synthetic(1500, rng)
    model = SensorModel(7, 12)
    print("trainable:", sum(p.numel() for p in model.parameters() if p.requires_grad))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(15):
        squared = 0.0
        for rows in torch.randperm(len(x), generator=rng).split(75):
            residual = model(x[rows]) - y[rows]
            loss = residual.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            squared += residual.detach().square().sum(0)
        if epoch % 2 == 0:
            rmse = (squared / len(x)).sqrt()
            print(epoch, " ".join(f"{n}={v:.3f}" for n, v in zip(SENSORS, rmse.tolist())))


if __name__ == "__main__":
    main()
