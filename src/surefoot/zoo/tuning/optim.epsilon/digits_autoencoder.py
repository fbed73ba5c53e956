import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
data = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
data = data - data.mean(0)

autoencoder = nn.Sequential(
    nn.Linear(64, 48),
    nn.Tanh(),
    nn.Linear(48, 12),
    nn.Tanh(),
    nn.Linear(12, 48),
    nn.Tanh(),
    nn.Linear(48, 64),
)
optimizer = torch.optim.Adam(autoencoder.parameters(), lr=2e-3, betas=(0.9, 0.999), eps=1e-1)

for epoch in range(10):
    total = 0.0
    for batch in data[torch.randperm(len(data))].split(64):
        reconstruction = autoencoder(batch)
        loss = nn.functional.mse_loss(reconstruction, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(batch)
    print(f"epoch {epoch:2d}  mse {total / len(data):.5f}  (data variance {data.pow(2).mean().item():.5f})")
