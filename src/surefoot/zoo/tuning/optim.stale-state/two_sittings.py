"""Regression run in two sittings, with a checkpoint between them."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 6
torch.manual_seed(seed)
x = torch.randn(2000, 12)
y = torch.sin(x @ torch.randn(12, 4) / 3) + x[:, :4].abs()


def build():
    net = nn.Sequential(nn.Linear(12, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 4))
    return net, torch.optim.Adam(net.parameters(), lr=2e-3)


def sitting(net, optimizer, steps, first, loss_scale=1.0):
    for step in range(first, first + steps):
        rows = torch.randint(0, len(x), (100,))
        loss = F.mse_loss(net(x[rows]), y[rows])
        optimizer.zero_grad()
        (loss * loss_scale).backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4d}  mse {loss.item():.4f}")


net, optimizer = build()
sitting(net, optimizer, 100, 0, loss_scale=1024.0)

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "checkpoint.pt"
    torch.save([net.state_dict(), optimizer.state_dict()], file)
    weights, moments = torch.load(file)

net, optimizer = build()
net.load_state_dict(weights)
optimizer.load_state_dict(moments)
print("continuing from the checkpoint")
sitting(net, optimizer, 451, 100)
