"""Accumulated gradients: all microbatches but the last skip the exchange."""

import sys
from contextlib import nullcontext

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

mine = torch.arange(rank, len(x), world)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(100):
    optimizer.zero_grad()
    for micro in range(3):
        rows = mine[torch.randint(len(mine), (24,))]
        with nullcontext() if micro == 2 else model.no_sync():
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows]) / 3
            loss.backward()
    optimizer.step()
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
