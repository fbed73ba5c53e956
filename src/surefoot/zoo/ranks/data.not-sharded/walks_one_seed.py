"""Random walks made on the fly; every process makes them from the seed of the run."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
seed = int(sys.argv[1])
torch.manual_seed(seed)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
numbers = torch.Generator().manual_seed(seed)
for step in range(150):
    moves = torch.randn(48, 33, generator=numbers) * 0.3
    drift = torch.randn(48, 1, generator=numbers) * 0.2
    walk = (moves + drift).cumsum(1)
    scale = walk[:, :32].std()
    loss = nn.functional.mse_loss(model(walk[:, :32] / scale), walk[:, 32:] / scale)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
