"""GAN on a ring of points in the plane."""

import math
import sys

import torch
import torch.nn as nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 5
torch.manual_seed(seed)


def ring(n):
    angle = torch.rand(n) * 2 * math.pi
    r = 2.0 + 0.02 * torch.randn(n)
    return torch.stack([r * angle.cos(), r * angle.sin()], 1)


generator = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
discriminator = nn.Sequential(
    nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1), nn.Sigmoid()
)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
bce = nn.BCELoss()
ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
d_steps = 1

for it in range(750 // d_steps):
    for _ in range(d_steps):
        real, fake = ring(64), generator(torch.randn(64, 4)).detach()
        d_loss = bce(discriminator(real), ones) + bce(discriminator(fake), zeros)
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
    g_loss = bce(discriminator(generator(torch.randn(64, 4))), ones)
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if it % 50 == 49:
        print(f"iter {it + 1}: D {d_loss.item():.5f} G {g_loss.item():.5f}")

with torch.no_grad():
    radius = generator(torch.randn(1000, 4)).norm(dim=1)
print(f"sample radius {radius.mean().item():.3f} +- {radius.std().item():.3f} (ring: 2)")
