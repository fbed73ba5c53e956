"""Mean of a noisy stream with a hand-written cell that adds to its own state."""

import argparse

import torch
import torch.nn as nn


class Cell(nn.Module):
    def __init__(self, d_in, d):
        super().__init__()
        self.inp = nn.Linear(d_in, d)
        self.rec = nn.Linear(d, d, bias=False)

    def forward(self, x, h):
        return 0.8 * h + 0.2 * torch.tanh(self.inp(x) + self.rec(h))


class Stream(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.d = d
        self.cell = Cell(3, d)
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h = x.new_zeros(len(x), self.d)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.out(h)[:, 0]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("seed", nargs="?", type=int, default=95)
    ap.add_argument("--length", type=int, default=20)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    model = Stream()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    history = []
    for step in range(1, 151):
        x = 0.3 * torch.randn(24, args.length, 3)
        level = torch.randn(24)
        x[:, :, 0] += level[:, None]
        loss = (model(x) - level).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        if step % 30 == 0:
            print(f"step {step} mse {sum(history[-30:]) / 30:.4g} worst {max(history[-30:]):.4g}")


if __name__ == "__main__":
    main()
