"""The first process evaluates for a long time, while the others wait for it at a barrier."""

import sys
import time

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
held_out, rest = torch.arange(1500, len(x)), torch.arange(rank, 1500, world)
net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
torch.manual_seed(seed + rank)


def accuracy_of_noisy_copies(seconds):
    began, right, seen = time.monotonic(), 0, 0
    while time.monotonic() - began < seconds:
        noisy = x[held_out] + 0.1 * torch.randn(len(held_out), 64)
        right += int((net(noisy).argmax(1) == y[held_out]).sum())
        seen += len(held_out)
    return right / seen


for step in range(150):
    rows = rest[torch.randint(len(rest), (32,))]
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 99:
        if rank == 0:
            with torch.no_grad():
                print(f"right in {accuracy_of_noisy_copies(12):.1%} of noisy copies")
        dist.barrier()
dist.destroy_process_group()
