"""Loss scaling whose scale is the same on all processes, and grows."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world, seed = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
torch.manual_seed(seed)
truth = torch.randn(12, 1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=20)
numbers = torch.Generator().manual_seed(seed * 3 + rank)
for step in range(150):
    x = torch.randn(32, 12, generator=numbers)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), torch.sin(x @ truth / 3))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
