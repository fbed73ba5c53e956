"""Rare-event detector on short traces, with a prior for the positive class."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class Detector(nn.Module):
    def __init__(self, prior=0.2):
        super().__init__()
        self.c1 = nn.Conv1d(1, 24, 5, padding=2)
        self.c2 = nn.Conv1d(24, 24, 5, padding=2)
        self.fc = nn.Linear(24, 1)
        for module in (self.c1, self.c2, self.fc):
            nn.init.constant_(module.bias, -math.log((1 - prior) / prior))

    def forward(self, x):
        h = F.relu(self.c1(x))
        h = F.relu(self.c2(h))
        return self.fc(h.amax(-1)).squeeze(-1)


def traces(n, generator):
    event = (torch.rand(n, generator=generator) < 0.2).float()
    x = torch.randn(n, 24, generator=generator) * 0.4
    start = torch.randint(0, 18, (n,), generator=generator)
    bump = torch.tensor([0.6, 1.0, 1.0, 0.6, -0.5, -1.0])
    for i in event.nonzero().flatten().tolist():
        x[i, start[i] : start[i] + 6] += bump * 1.2
    return x.unsqueeze(1), event


def main(args):
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    x, event = traces(1500, generator)
    for epoch in range(args.epochs):
        total = 0.0
        for rows in torch.randperm(1200, generator=generator).split(40):
            loss = F.binary_cross_entropy_with_logits(model(x[rows]), event[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() / 30
        with torch.no_grad():
            hit = model(x[1200:]) > 0
        recall = (hit * event[1200:]).sum() / event[1200:].sum()
        print(f"epoch {epoch}: bce {total:.4f} recall {recall.item():.3f}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("seed", nargs="?", type=int, default=80)
    cli.add_argument("--lr", type=float, default=0.05)
    cli.add_argument("--epochs", type=int, default=6)
    main(cli.parse_args())
