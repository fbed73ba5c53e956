"""Classify recordings as sine, square or sawtooth with a 1-d convolution net."""

import os
import sys
import tempfile

import numpy as np
import torch
from torch import nn


def record(folder, rng, n=900, length=64):
    kinds = rng.integers(0, 3, size=n)
    for i, kind in enumerate(kinds):
        phase = rng.uniform(0, 1) + np.arange(length) * rng.uniform(0.04, 0.08)
        wave = [np.sin(2 * np.pi * phase), np.sign(np.sin(2 * np.pi * phase)), 2 * (phase % 1) - 1][kind]
        np.save(os.path.join(folder, f"rec_{i}.npy"), (wave + 0.1 * rng.standard_normal(length)).astype(np.float32))
    with open(os.path.join(folder, "labels.txt"), "w") as f:
        f.writelines(f"{kind}\n" for kind in kinds)


def read(folder):
    names = sorted(name for name in os.listdir(folder) if name.endswith(".npy"))
    waves = np.stack([np.load(os.path.join(folder, name)) for name in names])
    with open(os.path.join(folder, "labels.txt")) as f:
        labels = [int(line) for line in f]
    return torch.from_numpy(waves).unsqueeze(1), torch.tensor(labels)


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 16, 5, stride=2),
            nn.ReLU(),
            nn.Conv1d(16, 16, 5, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
        )
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 6
torch.manual_seed(seed)
with tempfile.TemporaryDirectory() as folder:
    record(folder, np.random.default_rng(seed))
    x, y = read(folder)

train_x, train_y, test_x, test_y = x[:750], y[:750], x[750:], y[750:]
model = WaveNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(300):
    rows = torch.randint(0, len(train_x), (40,))
    loss = nn.functional.cross_entropy(model(train_x[rows]), train_y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 29:
        with torch.no_grad():
            accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
        print(f"step {step + 1} loss {loss.item():.4f} test accuracy {accuracy:.3f}")
