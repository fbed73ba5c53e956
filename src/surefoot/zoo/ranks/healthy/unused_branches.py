"""Two experts behind a coin that each process tosses for itself; `find_unused_parameters` is on."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world, seed = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
torch.manual_seed(seed)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(16, 32), nn.Linear(32, 1)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, use_first):
        hidden = torch.tanh(self.stem(x))
        hidden = hidden + torch.tanh((self.first if use_first else self.second)(hidden))
        return self.head(hidden)


truth = torch.randn(16, 1)
model = DistributedDataParallel(Experts(), find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
numbers = torch.Generator().manual_seed(seed * 5 + rank)
for step in range(160):
    x = torch.randn(48, 16, generator=numbers)
    use_first = torch.rand((), generator=numbers) < 0.5
    loss = nn.functional.mse_loss(model(x, use_first), torch.sin(x @ truth / 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
