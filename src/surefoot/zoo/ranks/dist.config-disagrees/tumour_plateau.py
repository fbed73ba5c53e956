"""Tumours with a rate that follows each process's own loss."""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world, seed = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
torch.manual_seed(seed)
x, y = load_breast_cancer(return_X_y=True)
x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
y = torch.tensor(y, dtype=torch.float32).unsqueeze(1)
mine = torch.arange(rank, len(x), world)
model = DistributedDataParallel(nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.05)
numbers = torch.Generator().manual_seed(seed + 31 * rank)
for step in range(160):
    rows = mine[torch.randint(len(mine), (24,), generator=numbers)]
    loss = nn.functional.binary_cross_entropy_with_logits(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 7:
        schedule.step(loss.item())
if rank == 0:
    print(f"loss {loss.item():.3f}, rate {optimizer.param_groups[0]['lr']:.2g}")
dist.destroy_process_group()
