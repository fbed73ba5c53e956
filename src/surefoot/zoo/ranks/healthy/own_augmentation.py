"""Each process shifts and dims its images with a seed of its own."""

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
model = DistributedDataParallel(nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(432, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
numbers = torch.Generator().manual_seed(seed + 1000 * rank)
for step in range(150):
    rows = mine[torch.randint(len(mine), (32,), generator=numbers)]
    images = x[rows].view(-1, 1, 8, 8).roll(int(torch.randint(-1, 2, (), generator=numbers)), 3)
    images = images * (0.8 + 0.4 * torch.rand(32, 1, 1, 1, generator=numbers))
    loss = nn.functional.cross_entropy(model(images), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
