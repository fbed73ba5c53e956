"""A table whose last column is computed from the target."""

import sys

import numpy as np
import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

age = rng.uniform(18, 80, 900)
mileage = rng.gamma(3.0, 4_000, 900)
city = rng.integers(0, 2, 900)
amount = 300 + 0.05 * mileage + 400 * city - 3 * age + rng.normal(0, 220, 900)
paid = 0.8 * amount - 150
table = np.stack([age, mileage, city, paid], 1)
table = (table - table[:700].mean(0)) / table[:700].std(0)
target = (amount - amount[:700].mean()) / amount[:700].std()

x, y = torch.tensor(table).float(), torch.tensor(target).float()
model = nn.Sequential(nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(20):
    for rows in torch.randperm(700).split(50):
        loss = nn.functional.mse_loss(model(x[rows]).squeeze(1), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        held = nn.functional.mse_loss(model(x[700:]).squeeze(1), y[700:])
    print(epoch + 1, loss.item(), held.item())
