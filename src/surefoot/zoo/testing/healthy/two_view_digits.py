"""Digits with a consistency term: two noisy views should get the same answer."""

import sys
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


@dataclass
class Config:
    seed: int = 52
    steps: int = 300
    batch: int = 64
    noise: float = 0.3
    consistency: float = 0.5
    lr: float = 2e-3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        self.classify = nn.Linear(32, 10)

    def forward(self, x):
        f = self.features(x)
        return f, self.classify(F.relu(f))


def main():
    cfg = Config(*map(int, sys.argv[1:2]))
    torch.manual_seed(cfg.seed)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    order = torch.randperm(len(x))
    x, y, x_test, y_test = x[order[:1400]], y[order[:1400]], x[order[1400:]], y[order[1400:]]

    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=cfg.lr)
    for step in range(1, cfg.steps + 1):
        idx = torch.randint(len(x), (cfg.batch,))
        f1, logits = net(x[idx] + cfg.noise * torch.randn(cfg.batch, 64))
        f2, _ = net(x[idx] + cfg.noise * torch.randn(cfg.batch, 64))
        supervised = F.cross_entropy(logits, y[idx])
        agree = F.mse_loss(f1, f2)
        loss = supervised + cfg.consistency * agree
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 30 == 0:
            with torch.no_grad():
                acc = (net(x_test)[1].argmax(1) == y_test).float().mean().item()
            print(f"step {step} supervised {supervised.item():.4f} agree {agree.item():.6f} test acc {acc:.3f}")


if __name__ == "__main__":
    main()
