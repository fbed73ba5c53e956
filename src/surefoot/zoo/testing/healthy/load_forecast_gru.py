"""One-step forecast of a noisy seasonal signal with a GRU. The noise sets the floor of the error."""

import sys

import numpy as np
import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 7
rng = np.random.default_rng(seed)
torch.manual_seed(seed)

t = np.arange(3000)
clean = np.sin(2 * np.pi * t / 24) + 0.5 * np.sin(2 * np.pi * t / 168)
NOISE = 0.3
series = torch.tensor(clean + NOISE * rng.standard_normal(len(t)), dtype=torch.float32)
WINDOW = 36


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        return self.out(self.gru(x.unsqueeze(-1))[0][:, -1]).squeeze(-1)


def windows(start, stop):
    index = np.arange(start, stop - WINDOW)
    x = torch.stack([series[i : i + WINDOW] for i in index])
    return x, series[index + WINDOW]


x_train, y_train = windows(0, 2400)
x_test, y_test = windows(2400, 3000)
model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[120, 160], gamma=0.3)
recent = []
for step in range(1, 201):
    rows = torch.randint(len(x_train), (48,))
    loss = nn.functional.mse_loss(model(x_train[rows]), y_train[rows])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    recent.append(loss.item())
    if step % 20 == 0:
        print(f"step {step:4d}  mse {np.mean(recent[-20:]):.4f}  (noise {NOISE**2:.4f})")
with torch.no_grad():
    print(f"test mse {nn.functional.mse_loss(model(x_test), y_test).item():.4f}")
