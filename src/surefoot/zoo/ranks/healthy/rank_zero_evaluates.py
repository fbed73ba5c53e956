"""The first process evaluates on its own every few steps, with dropout off."""

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

held_out, rest = torch.arange(1500, len(x)), torch.arange(rank, 1500, world)
net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 10))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
torch.manual_seed(seed + rank)
for step in range(150):
    rows = rest[torch.randint(len(rest), (32,))]
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 30 == 29:
        net.eval()
        with torch.no_grad():
            print(f"held out: {nn.functional.cross_entropy(net(x[held_out]), y[held_out]).item():.3f}")
        net.train()
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
