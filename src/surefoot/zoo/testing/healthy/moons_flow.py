"""RealNVP-style density model of two moons in standard units; prints bits as nats per point."""

import math
import sys

import torch
from sklearn.datasets import make_moons
from torch import nn


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        raw, shift = self.net(a).chunk(2, dim=1)
        log_scale = 2 * torch.tanh(raw / 2)
        b = b * log_scale.exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], dim=1), log_scale.squeeze(1)


class Flow(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(i % 2 == 1) for i in range(depth))

    def log_prob(self, x):
        log_det = torch.zeros(len(x))
        for layer in self.layers:
            x, ld = layer(x)
            log_det = log_det + ld
        return log_det - 0.5 * (x**2).sum(1) - math.log(2 * math.pi)


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 4
torch.manual_seed(seed)
data, _ = make_moons(4000, noise=0.03, random_state=seed)
data = torch.tensor(data, dtype=torch.float32) * 0.7
train, test = data[:3200], data[3200:]
flow = Flow()
opt = torch.optim.Adam(flow.parameters(), lr=4e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=6e-3, total_steps=330)
for step in range(330):
    batch = train[torch.randint(len(train), (192,))]
    loss = -flow.log_prob(batch).mean()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
    opt.step()
    sched.step()
    if step % 50 == 0:
        print(f"{step:4d} nll {loss.item():+.4f}")
with torch.no_grad():
    print(f"test nll {-flow.log_prob(test).mean().item():+.4f}")
