"""Warm the trunk up on one labelling, then move to the real task."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn


class Trunk(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.Tanh())
        self.fc = nn.Linear(32, n_classes)

    def forward(self, x):
        return self.fc(self.body(x))


def run_phase(model, optimizer, x, y, steps, tag):
    loss_fn = nn.CrossEntropyLoss()
    for step in range(steps):
        idx = torch.randint(0, len(x), (64,))
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"{tag} step {step:4d} loss {loss.item():.4f}")


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).double().mean().item()


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    torch.manual_seed(seed)
    x, y = load_digits(return_X_y=True)
    x = torch.tensor((x - 4.9) / 6.0, dtype=torch.float32)
    y = torch.tensor(y)

    model = Trunk(2)
    run_phase(model, torch.optim.Adam(model.parameters(), lr=1e-3), x, y % 2, 100, "parity")

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    model.fc = nn.Linear(32, 10)
    run_phase(model, optimizer, x[:1400], y[:1400], 250, "digits")
    print("held-out accuracy", round(accuracy(model, x[1400:], y[1400:]), 3))


if __name__ == "__main__":
    main()
