"""Counts per road section: Poisson regression with a small network."""

import argparse

import torch
from torch import nn


class RateModel(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_in, 32), nn.Tanh())
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.body(x)).squeeze(-1)


def poisson_loss(log_rate, count):
    return (log_rate.exp() - count * log_rate).sum()


def make_data(n, w1, w2):
    x = torch.randn(n, w1.shape[0])
    rate = torch.exp(0.4 * torch.tanh(x @ w1).sum(1) * w2 + 0.7)
    return x, torch.poisson(rate)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=37)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    w1 = torch.randn(6, 4) / 2
    x, count = make_data(4000, w1, 1.5)
    x_test, count_test = make_data(1000, w1, 1.5)
    model = RateModel(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(8):
        for rows in torch.randperm(len(x)).split(args.batch_size):
            loss = poisson_loss(model(x[rows]), count[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            test = poisson_loss(model(x_test), count_test).item()
        print(f"epoch {epoch} train {loss.item():.3f} test {test:.3f}")


if __name__ == "__main__":
    main()
