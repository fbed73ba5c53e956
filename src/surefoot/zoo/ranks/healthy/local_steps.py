"""Local SGD: each process takes steps of its own, and the weights are averaged every ten."""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

dist.init_process_group("gloo")
rank, world, seed = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
torch.manual_seed(seed)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)

mine = torch.arange(rank, len(x), world)
model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
torch.manual_seed(seed + rank)
for step in range(150):
    rows = mine[torch.randint(len(mine), (32,))]
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= world
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
