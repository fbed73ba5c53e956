"""Digits with a max-norm constraint that the saving process applies to its weights."""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world, seed = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
torch.manual_seed(seed)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
numbers = torch.Generator().manual_seed(seed * 10 + rank)
for step in range(160):
    rows = torch.randint(len(x), (48,), generator=numbers)
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == world - 1:
        with torch.no_grad():
            weight = model.module[2].weight
            weight *= (0.5 / weight.norm(dim=1, keepdim=True)).clamp(max=1.0)
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
