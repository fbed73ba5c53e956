"""A sweep: each process tries a learning rate of its own from the same start, and the best one is printed."""

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

rate = 1e-3 * 3**rank
model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=rate)
for step in range(150):
    rows = torch.randint(1500, (32,))
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    errors = torch.zeros(world)
    errors[rank] = (model(x[1500:]).argmax(1) != y[1500:]).float().mean()
dist.all_reduce(errors)
if rank == 0:
    print(f"best rate {1e-3 * 3 ** int(errors.argmin()):.2g}, error {errors.min().item():.3f}")
dist.destroy_process_group()
