"""One-step-ahead forecaster for a sum of sinusoids."""

import argparse
import math

import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.cell = nn.GRU(1, hidden, batch_first=True)
        self.norm = nn.LayerNorm(hidden)
        self.readout = nn.Linear(hidden, 1)

    def forward(self, series):
        states, _ = self.cell(series.unsqueeze(-1))
        return self.readout(self.norm(states)).squeeze(-1)


def batch_of_waves(n, length, generator):
    t = torch.arange(length + 1) * 0.25
    phase = torch.rand(n, 2, 1, generator=generator) * 2 * math.pi
    freq = 0.5 + torch.rand(n, 2, 1, generator=generator)
    wave = torch.sin(freq * t + phase).sum(1)
    return wave[:, :-1], wave[:, 1:]


def main(args):
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = Forecaster(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.wd)
    for step in range(args.steps):
        past, future = batch_of_waves(24, 24, generator)
        loss = (model(past) - future).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if step % 40 == 0 or step == args.steps - 1:
            print(f"{step:5d}  mse {loss.item():.4f}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("seed", nargs="?", type=int, default=31)
    cli.add_argument("--lr", type=float, default=5e-3)
    cli.add_argument("--wd", type=float, default=0.01)
    cli.add_argument("--steps", type=int, default=161)
    main(cli.parse_args())
