"""A forecast with accumulated gradients; every microbatch of a window skips the exchange."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE = 4

dist.init_process_group("gloo")
rank, seed = dist.get_rank(), int(sys.argv[1])
torch.manual_seed(seed)
model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
numbers = torch.Generator().manual_seed(1000 * seed + rank)


def windows(count):
    start = torch.rand(count, 1, generator=numbers) * 6.28
    hours = torch.arange(25) / 24 * 6.28
    load = torch.sin(start + hours) + 0.3 * torch.sin(2 * (start + hours))
    load = load + 0.05 * torch.randn(count, 25, generator=numbers)
    return load[:, :24], load[:, 24:]


for step in range(120):
    optimizer.zero_grad()
    with model.no_sync():
        for _ in range(ACCUMULATE):
            past, following = windows(16)
            loss = nn.functional.mse_loss(model(past), following) / ACCUMULATE
            loss.backward()
    optimizer.step()
    if rank == 0 and step % 40 == 0:
        print(f"step {step}: loss {loss.item() * ACCUMULATE:.4f}")
dist.destroy_process_group()
