"""Uncertainty by Monte Carlo dropout: dropout stays on while predicting, and the spread is read as doubt."""

import sys

import numpy as np
import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, 128),
            nn.ReLU(),
            nn.Dropout(p),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Dropout(p),
            nn.Linear(128, 1),
        )

    def forward(self, x):
        return self.net(x)

    @torch.no_grad()
    def predict(self, x, samples=40):
        self.train()
        draws = torch.stack([self(x) for _ in range(samples)])
        return draws.mean(0), draws.std(0)


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 3
torch.manual_seed(seed)
rng = np.random.default_rng(seed)
x = np.concatenate([rng.uniform(-2, -0.5, 200), rng.uniform(0.5, 2, 200)])
y = np.sin(2 * x) + 0.1 * rng.standard_normal(len(x))
x, y = (torch.tensor(a, dtype=torch.float32).unsqueeze(1) for a in (x, y))

model = Regressor()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-5)
loss_fn = nn.MSELoss()
for epoch in range(40):
    model.train()
    total = 0.0
    for rows in torch.randperm(len(x)).split(40):
        loss = loss_fn(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() / 10
    if epoch % 5 == 0:
        grid = torch.linspace(-2, 2, 9).unsqueeze(1)
        mean, std = model.predict(grid)
        print(f"epoch {epoch:2d}  mse {total:.4f}  mean std {std.mean().item():.3f}")

near, far = torch.tensor([[1.0], [-1.0]]), torch.tensor([[4.0], [-4.0]])
print(f"std near the data {model.predict(near)[1].mean().item():.3f}, far {model.predict(far)[1].mean().item():.3f}")
