"""Half-precision factors for ratings; each process looks for the loss scale that suits it."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, seed = dist.get_rank(), int(sys.argv[1])
torch.manual_seed(seed)
users, items = torch.randn(40, 4), torch.randn(60, 4)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + 2 * rank), growth_interval=50)
numbers = torch.Generator().manual_seed(seed + 77 * rank)
for step in range(150):
    u = torch.randint(40, (64,), generator=numbers)
    i = torch.randint(60, (64,), generator=numbers)
    rating = (users[u] * items[i]).sum(1, keepdim=True) / 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(torch.cat([users[u], items[i]], 1)).float(), rating)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
if rank == 0:
    print(f"loss {loss.item():.3f}, scale {scaler.get_scale():g}")
dist.destroy_process_group()
