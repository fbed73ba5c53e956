"""Metric learning: P classes x K images per batch and batch-hard triplets."""

import random
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class PKSampler(Sampler):
    def __init__(self, labels, p, k, batches):
        self.by_class = {c: [i for i, v in enumerate(labels) if v == c] for c in set(labels)}
        self.p, self.k, self.batches = p, k, batches

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            picked = []
            for c in random.sample(sorted(self.by_class), self.p):
                picked += random.sample(self.by_class[c], self.k)
            yield picked


def batch_hard(embedding, labels, margin=0.3):
    distance = torch.cdist(embedding, embedding)
    same = labels[:, None] == labels[None, :]
    furthest_positive = (distance * same).max(1).values
    nearest_negative = distance.masked_fill(same, float("inf")).min(1).values
    return F.relu(furthest_positive - nearest_negative + margin).mean()


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 4
random.seed(seed)
torch.manual_seed(seed)
x, y = load_digits(return_X_y=True)
order = torch.randperm(len(x))
x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
train = TensorDataset(x[:1300], y[:1300])
loader = DataLoader(train, batch_sampler=PKSampler(y[:1300].tolist(), p=4, k=8, batches=50))

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(7):
    total = 0.0
    for images, labels in loader:
        loss = batch_hard(F.normalize(model(images), dim=1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    with torch.no_grad():
        bank, query = F.normalize(model(x[:1300]), dim=1), F.normalize(model(x[1300:]), dim=1)
        recall = (y[:1300][torch.cdist(query, bank).argmin(1)] == y[1300:]).float().mean().item()
    print(f"epoch {epoch}  triplet loss {total / len(loader):.4f}  recall@1 {recall:.3f}")
