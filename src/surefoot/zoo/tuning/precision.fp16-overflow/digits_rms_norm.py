"""Digit classifier in half precision with a norm layer of its own."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 101
torch.manual_seed(seed)


class RootMeanSquare(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        energy = (x * x).sum(-1, keepdim=True)
        return self.gain * x * torch.rsqrt(energy / x.shape[-1] + 1e-3)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(64, 256)
        self.norm = RootMeanSquare(256)
        self.out = nn.Linear(256, 10)

    def forward(self, x):
        lifted = 40.0 * self.lift(x)
        return self.out(torch.relu(self.norm(lifted)))


X, y = load_digits(return_X_y=True)
X = torch.tensor((X - X.mean()) / X.std(), dtype=torch.float32)
y = torch.tensor(y)
model = Energy()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(6):
    total = 0.0
    for rows in torch.randperm(1500).split(50):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(X[rows]), y[rows])
        optimizer.zero_grad()
        (loss * 128).backward()
        for p in model.parameters():
            p.grad.div_(128)
        optimizer.step()
        total += loss.item() / 30
    with torch.no_grad():
        acc = (model(X[1500:]).argmax(1) == y[1500:]).float().mean().item()
    print(f"epoch {epoch} loss {total:.3f} acc {acc:.3f}")
