"""An exponential average of the weights, kept and saved by the first process."""

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
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
average = (
    torch.optim.swa_utils.AveragedModel(model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))
    if rank == 0
    else None
)
for step in range(150):
    rows = mine[torch.randint(len(mine), (32,))]
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if average is not None:
        average.update_parameters(model.module)
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
