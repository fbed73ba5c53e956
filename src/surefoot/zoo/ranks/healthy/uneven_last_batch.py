"""Digits shared out with `DistributedSampler`; the last batch of an epoch is smaller."""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world, seed = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
torch.manual_seed(seed)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)

data = TensorDataset(x[:1777], y[:1777])
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, batch_size=50, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
