"""Physics-informed net for u'' + u = 0, u(0) = 0, u'(0) = 1 (the answer is the sine)."""

import math
import sys

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 1)

net = nn.Sequential(
    weight_norm(nn.Linear(1, 32)), nn.Tanh(), weight_norm(nn.Linear(32, 32)), nn.Tanh(), nn.Linear(32, 1)
)
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=250, gamma=0.4)


def derivative(out, inp):
    return torch.autograd.grad(out.sum(), inp, create_graph=True)[0]


for step in range(700):
    t = (math.pi * torch.rand(64, 1)).requires_grad_()
    u = net(t)
    residual = derivative(derivative(u, t), t) + u
    t0 = torch.zeros(1, 1, requires_grad=True)
    u0 = net(t0)
    start = u0.pow(2).mean() + (derivative(u0, t0) - 1).pow(2).mean()
    loss = residual.pow(2).mean() + start
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 100 == 0:
        print(f"{step:4d} loss {loss.item():.6f} residual {residual.pow(2).mean().item():.6f}")

with torch.no_grad():
    grid = torch.linspace(0, math.pi, 50).unsqueeze(1)
    print(f"largest error against the sine: {(net(grid) - torch.sin(grid)).abs().max().item():.4f}")
