"""Treated or not? Two measurements per patient, one before and one after the treatment."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 46
torch.manual_seed(seed)


class Patients(Dataset):
    def __init__(self, n, effect):
        person = 2.0 * torch.randn(n, 1, 6) @ torch.randn(6, 20)
        self.rows = (person + torch.stack([-effect, effect]) + 0.4 * torch.randn(n, 2, 20)) / 3.0
        self.target = torch.tensor([0.0, 1.0]).repeat(n, 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.target[i]


effect = 0.5 * torch.randn(20)
data = Patients(320, effect)
loader = DataLoader(data, batch_size=1, shuffle=True)

model = nn.Sequential(
    nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loss_fn = nn.BCEWithLogitsLoss()
for epoch in range(3):
    model.train()
    total = 0.0
    for rows, target in loader:
        logits = model(rows.flatten(0, 1)).squeeze(1)
        loss = loss_fn(logits, target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    model.eval()
    with torch.no_grad():
        logits = model(data.rows.flatten(0, 1)).squeeze(1)
    target = data.target.flatten()
    acc = ((logits > 0).float() == target).float().mean().item()
    print(
        f"epoch {epoch} train {total / len(loader):.3f} | eval, same data {loss_fn(logits, target).item():.3f} acc {acc:.3f}"
    )
