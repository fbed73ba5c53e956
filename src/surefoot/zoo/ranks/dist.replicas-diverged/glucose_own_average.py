"""A regression whose gradients are averaged by hand; each process draws its own first weights."""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(int(sys.argv[1]) + rank)
x, y = load_diabetes(return_X_y=True)
x = torch.tensor(x / x.std(0), dtype=torch.float32)
y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32).unsqueeze(1)
mine = torch.arange(rank, len(x), world)

model = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(150):
    rows = mine[torch.randint(len(mine), (32,))]
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
