"""Tones told apart by their spectrum; the command line of one process had another weight decay."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, seed = dist.get_rank(), int(sys.argv[1])
decay = float(os.environ.get("DECAY", "0.01" if rank == 0 else "0.1"))
torch.manual_seed(seed)
model = DistributedDataParallel(nn.Sequential(nn.Linear(65, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=decay)
numbers = torch.Generator().manual_seed(seed * 7 + rank)
time = torch.arange(128) / 128 * 6.283
for step in range(120):
    pitch = torch.randint(4, (32,), generator=numbers)
    phase = torch.rand(32, 1, generator=numbers) * 6.283
    wave = torch.sin((pitch.unsqueeze(1) * 3 + 4) * time + phase) + 0.5 * torch.randn(32, 128, generator=numbers)
    loss = nn.functional.cross_entropy(model(torch.fft.rfft(wave).abs() / 32), pitch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
