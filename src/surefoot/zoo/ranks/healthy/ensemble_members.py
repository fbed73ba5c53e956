"""An ensemble: each process trains a member of its own, and the members vote at the end."""

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

torch.manual_seed(seed + 100 * rank)
model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(150):
    rows = torch.randint(1500, (32,))
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    votes = model(x[1500:]).softmax(1)
dist.all_reduce(votes)
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
