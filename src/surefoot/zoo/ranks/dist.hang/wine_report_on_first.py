"""Wines; the first process averages the loss for its report, alone."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=40))
rank, world, seed = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
torch.manual_seed(seed)
x, y = load_wine(return_X_y=True)
x, y = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32), torch.tensor(y)
mine = torch.arange(rank, len(x), world)
model = DistributedDataParallel(nn.Sequential(nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
torch.manual_seed(seed + rank)
for step in range(150):
    rows = mine[torch.randint(len(mine), (24,))]
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step == 99:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        print(f"step {step + 1}: loss {mean.item() / world:.3f}")
dist.destroy_process_group()
