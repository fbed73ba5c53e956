"""Fits a bump function; polynomial decay of the step size."""

import sys
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn


@dataclass
class Settings:
    seed: int = 15
    base_lr: float = 0.03
    epochs: int = 10
    batch: int = 40
    rows: int = 1600
    widths: list = field(default_factory=lambda: [2, 64, 64, 1])


def build(widths):
    layers = []
    for a, b in zip(widths[:-1], widths[1:]):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def main(s):
    torch.manual_seed(s.seed)
    rng = np.random.default_rng(s.seed)
    xy = rng.uniform(-2, 2, (s.rows, 2)).astype(np.float32)
    z = (np.exp(-(xy**2).sum(1)) + 0.5 * np.sin(2 * xy[:, 0])).astype(np.float32)
    net = build(s.widths)
    opt = torch.optim.SGD(net.parameters(), lr=s.base_lr, momentum=0.9)
    total_steps = s.epochs * s.batch / 2
    step = 0
    for epoch in range(s.epochs):
        losses = []
        for rows in np.array_split(rng.permutation(s.rows), s.rows // s.batch):
            for group in opt.param_groups:
                group["lr"] = s.base_lr * (1 - step / total_steps)
            out = net(torch.from_numpy(xy[rows]))[:, 0]
            loss = nn.functional.mse_loss(out, torch.from_numpy(z[rows]))
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
            step += 1
        print(f"epoch {epoch} mse {np.mean(losses):.5f} lr {opt.param_groups[0]['lr']:.5f}")


if __name__ == "__main__":
    settings = Settings()
    if len(sys.argv) > 1:
        settings.seed = int(sys.argv[1])
    main(settings)
