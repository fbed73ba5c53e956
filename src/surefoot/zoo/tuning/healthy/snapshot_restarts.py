"""Snapshot ensemble: one network, cosine cycles, a copy of the weights at the end of every cycle."""

import copy
import sys

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import nn


def batches(x, y, size, rng):
    order = rng.permutation(len(x))
    for start in range(0, len(order) - size + 1, size):
        rows = order[start : start + size]
        yield x[rows], y[rows]


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 17
rng = np.random.default_rng(seed)
torch.manual_seed(seed)
data = load_breast_cancer()
order = rng.permutation(len(data.data))
x, y = data.data[order], data.target[order]
x = (x - x[:400].mean(0)) / x[:400].std(0)
x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)

model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=60, T_mult=2, eta_min=1e-4)
snapshots, step = [], 0
cycle_ends = {60, 180, 420}

while step < 420:
    for xb, yb in batches(x[:400], y[:400], 32, rng):
        loss = F.binary_cross_entropy_with_logits(model(xb).squeeze(1), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step % 30 == 0:
            print(f"step {step:3d}  lr {optimizer.param_groups[0]['lr']:.4f}  loss {loss.item():.4f}")
        if step in cycle_ends:
            snapshots.append(copy.deepcopy(model).eval())
        if step >= 420:
            break

with torch.no_grad():
    votes = torch.stack([torch.sigmoid(m(x[400:]).squeeze(1)) for m in snapshots])
    for i, p in enumerate(votes):
        print(f"snapshot {i}: accuracy {((p > 0.5) == y[400:].bool()).float().mean().item():.3f}")
    print(f"ensemble: accuracy {((votes.mean(0) > 0.5) == y[400:].bool()).float().mean().item():.3f}")
