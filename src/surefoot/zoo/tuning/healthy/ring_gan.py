"""Plain GAN: binary cross-entropy, one-sided label smoothing, points on a circle."""

import argparse
import math

import torch
import torch.nn as nn


class Generator(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)


def sample_ring(n):
    angle = 2 * math.pi * torch.rand(n)
    radius = 1 + 0.08 * torch.randn(n)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def describe(x):
    radius = x.norm(dim=1)
    bins = torch.histc(torch.atan2(x[:, 1], x[:, 0]), bins=12, min=-math.pi, max=math.pi)
    return f"radius {radius.mean().item():.3f} +- {radius.std().item():.3f}, {(bins > 10).sum().item()}/12 sectors"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=5)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    latent, batch = 4, 128
    G, D = Generator(latent), Discriminator()
    g_opt = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()

    for it in range(600):
        real, fake = sample_ring(batch), G(torch.randn(batch, latent))
        d_loss = bce(D(real), torch.full((batch,), 0.9)) + bce(D(fake.detach()), torch.zeros(batch))
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()

        g_loss = bce(D(fake), torch.ones(batch))
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        if it % 100 == 0:
            print(f"[{it:4d}] D {d_loss.item():.3f}  G {g_loss.item():.3f}")

    with torch.no_grad():
        print("generated:", describe(G(torch.randn(1000, latent))))
