"""A head on a frozen random body; the optimizer was given the head alone."""

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

mine = torch.arange(rank, len(x), world)
body, head = nn.Sequential(nn.Linear(64, 128), nn.ReLU()), nn.Linear(128, 10)
body.requires_grad_(False)
model = DistributedDataParallel(nn.Sequential(body, head))
optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
for step in range(150):
    rows = mine[torch.randint(len(mine), (32,))]
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
