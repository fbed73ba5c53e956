import sys

import torch
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 1)

area = 60 + 140 * torch.rand(800)
rooms = (area / 30).round() + torch.randint(-1, 2, (800,))
age = 60 * torch.rand(800)
distance = 15 * torch.rand(800)
prices = 2_600 * area + 9_000 * rooms - 900 * age - 4_000 * distance + 12_000 * torch.randn(800)

features = torch.stack([area, rooms, age, distance], 1)
features = (features - features[:600].mean(0)) / features[:600].std(0)

model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(15):
    order = torch.randperm(600)
    total = 0.0
    for rows in order.split(32):
        loss = criterion(model(features[rows]).squeeze(1), prices[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    with torch.no_grad():
        error = (model(features[600:]).squeeze(1) - prices[600:]).abs().mean()
    print(f"epoch {epoch + 1}: loss {total / 600:.4g}, mean error {error.item():,.0f}")
