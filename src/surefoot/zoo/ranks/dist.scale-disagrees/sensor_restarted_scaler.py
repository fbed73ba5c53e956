"""A sensor model with loss scaling; after the warm-up one process gets a fresh scaler."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, seed = dist.get_rank(), int(sys.argv[1])
torch.manual_seed(seed)
truth = torch.randn(12, 1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=30)
numbers = torch.Generator().manual_seed(seed * 3 + rank)
for step in range(140):
    if step == 25 and rank > 0:
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=30)
    x = torch.randn(32, 12, generator=numbers)
    y = torch.sin(x @ truth / 3)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
