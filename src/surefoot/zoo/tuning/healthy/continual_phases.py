"""Task A, then task B with a fresh optimizer and a little rehearsal of A."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        return self.out(self.features(x))


def run_phase(name, model, optimizer, sample, steps):
    for step in range(steps):
        xb, yb = sample()
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"[{name}] step {step:3d} loss {loss.item():.4f}")


@torch.no_grad()
def score(model, x, y):
    return (model(x).argmax(1) == y).float().mean().item()


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 90
torch.manual_seed(seed)
x, y = load_digits(return_X_y=True)
order = torch.randperm(len(x))
x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
train_x, train_y, test_x, test_y = x[:1400], y[:1400], x[1400:], y[1400:]
first, second = torch.nonzero(train_y < 6).flatten(), torch.nonzero(train_y >= 6).flatten()


def draw(pool, n):
    rows = pool[torch.randint(len(pool), (n,))]
    return train_x[rows], train_y[rows]


def mixed():
    new, old = draw(second, 32), draw(first, 32)
    return torch.cat([new[0], old[0]]), torch.cat([new[1], old[1]])


model = Model()
run_phase("A", model, torch.optim.Adam(model.parameters(), lr=2e-3), lambda: draw(first, 64), 200)
is_a = test_y < 6
print(f"after A: {score(model, test_x[is_a], test_y[is_a]):.3f} on A")
run_phase("B", model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), mixed, 250)
print(
    f"after B: {score(model, test_x[is_a], test_y[is_a]):.3f} on A, {score(model, test_x[~is_a], test_y[~is_a]):.3f} on B"
)
