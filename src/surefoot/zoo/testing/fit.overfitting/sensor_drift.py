"""Estimate a concentration from forty noisy sensors; the validation loss is averaged over batches, set by set."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)

mixing = torch.randn(40) / 40**0.5
readings = torch.randn(1_500, 40)
levels = torch.tanh(readings @ mixing)[:, None] + 0.5 * torch.randn(1_500, 1)
train = DataLoader(TensorDataset(readings[:160], levels[:160]), batch_size=16, shuffle=True)
valid = DataLoader(TensorDataset(readings[160:], levels[160:]), batch_size=128)

model = nn.Sequential(nn.Linear(40, 400), nn.GELU(), nn.Linear(400, 400), nn.GELU(), nn.Linear(400, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
criterion = nn.MSELoss()


@torch.no_grad()
def evaluate(loader):
    model.eval()
    total = sum(criterion(model(x), y).item() * len(x) for x, y in loader)
    model.train()
    return total / len(loader.dataset)


for epoch in range(30):
    for x, y in train:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    print(f"epoch {epoch}  train {evaluate(train):.4f}  valid {evaluate(valid):.4f}")
