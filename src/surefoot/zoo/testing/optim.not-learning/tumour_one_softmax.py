"""Benign or malignant, with a softmax over the only output."""

import sys

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
raw = load_breast_cancer()
x = torch.tensor((raw.data - raw.data.mean(0)) / raw.data.std(0), dtype=torch.float32)
y = torch.tensor(raw.target, dtype=torch.float32).unsqueeze(1)

model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Softmax(dim=1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.BCELoss()
for epoch in range(8):
    total = 0.0
    for rows in torch.randperm(len(x)).split(32):
        optimizer.zero_grad()
        loss = criterion(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(epoch, total)
