"""Which of three tones is in the signal? Dropout around the dense part."""

import sys

import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 41)
torch.manual_seed(int(rng.integers(1 << 30)))


def signals(n):
    kind = rng.integers(0, 3, n)
    time = np.arange(20)
    base = np.sin((0.3 + 0.5 * kind)[:, None] * time + rng.uniform(0, 6, (n, 1)))
    x = base + 0.15 * rng.normal(size=base.shape)
    return torch.tensor(x, dtype=torch.float32).unsqueeze(-1), torch.tensor(kind)


class ToneNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv1d(1, 24, 7, padding=3)
        self.dense = nn.Sequential(nn.Dropout(0.6), nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.6), nn.Linear(24, 3))

    def forward(self, x):
        return self.dense(self.filters(x.transpose(1, 2)).relu().mean(-1))


net = ToneNet()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
x_val, y_val = signals(300)
for step in range(1, 161):
    net.train()
    x, y = signals(32)
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0:
        net.eval()
        with torch.no_grad():
            pred = net(x_val).argmax(1).numpy()
        print(f"step {step:3d} train {loss.item():.3f} val acc {np.mean(pred == y_val.numpy()):.3f}")
