"""Predict a yes-or-no answer from twenty questions; two hundred people were asked, and the network is wide."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)

taste = torch.randn(20)
people = torch.randn(2_000, 20)
answers = (people @ taste + 4 * torch.randn(2_000) > 0).long()
train_x, train_y, held_x, held_y = people[:200], answers[:200], people[200:], answers[200:]

model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(50):
    model.train()
    for rows in torch.randperm(200).split(20):
        loss = F.cross_entropy(model(train_x[rows]), train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        held = F.cross_entropy(model(held_x), held_y)
    if epoch % 10 == 9:
        print(f"epoch {epoch}  train {loss.item():.3f}  held out {held.item():.3f}")
