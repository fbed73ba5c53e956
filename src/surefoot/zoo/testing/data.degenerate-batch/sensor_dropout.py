"""A sensor that now and then returns nothing for a whole batch."""

import random
import sys

import torch
from torch import nn

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(SEED)
random.seed(SEED)
readings = torch.randn(2000, 12)
force = (readings[:, :3].sum(1) + 0.1 * torch.randn(2000)).unsqueeze(1)
lost = set(random.sample(range(40, 240), 6))


def batches(count, size=40):
    for number in range(count):
        rows = torch.randint(2000, (size,))
        x = readings[rows]
        yield (torch.zeros_like(x) if number in lost else x), force[rows]


net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step, (x, y) in enumerate(batches(240)):
    loss = nn.functional.mse_loss(net(x), y)
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    if step % 40 == 0:
        print(step, loss.item())
