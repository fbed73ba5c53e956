"""Denoising diffusion of a spiral in the plane; samples come from an averaged copy of the net."""

import copy
import math
import sys

import torch
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 18)
T, BATCH, STEPS = 40, 200, 900
betas = torch.linspace(1e-3, 0.2, T)
alpha_bar = torch.cumprod(1 - betas, dim=0)


def spiral(n):
    angle = 1.6 * math.pi * torch.rand(n)
    radius = 0.5 + 0.3 * angle
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points + 0.03 * torch.randn(n, 2)


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.register_buffer("frequency", 2.0 ** torch.arange(6))
        self.net = nn.Sequential(
            nn.Linear(14, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x, t):
        angle = t.unsqueeze(1) / T * self.frequency
        return self.net(torch.cat([x, angle.cos(), angle.sin()], dim=1))


@torch.no_grad()
def ema_update(average, model, decay):
    for a, p in zip(average.parameters(), model.parameters(), strict=True):
        a.mul_(decay).add_(p, alpha=1 - decay)


@torch.no_grad()
def sample(net, n):
    x = torch.randn(n, 2)
    for t in reversed(range(T)):
        eps = net(x, torch.full((n,), t))
        x = (x - betas[t] / (1 - alpha_bar[t]).sqrt() * eps) / (1 - betas[t]).sqrt()
        if t > 0:
            x = x + betas[t].sqrt() * torch.randn_like(x)
    return x


model = Denoiser()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(STEPS):
    x0, t, noise = spiral(BATCH), torch.randint(T, (BATCH,)), torch.randn(BATCH, 2)
    scale = alpha_bar[t].unsqueeze(1)
    loss = (model(scale.sqrt() * x0 + (1 - scale).sqrt() * noise, t) - noise).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema_update(average, model, decay=0.99)
    if step % 150 == 0:
        print(f"step {step:4d}  loss {loss.item():.4f}")

fake, real = sample(average, 400), spiral(400)
print(f"mean distance from a sample to the spiral {torch.cdist(fake, real).min(1).values.mean().item():.4f}")
