"""Fully connected GAN that draws 8x8 digits."""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


@dataclass
class Options:
    seed: int = 64
    latent: int = 12
    noise_scale: float = 0.02
    batch: int = 48
    steps: int = 500
    lr_generator: float = 1e-3
    lr_critic: float = 5e-4


class Generator(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(latent, 96), nn.LeakyReLU(0.1), nn.Linear(96, 64), nn.Sigmoid())

    def forward(self, z):
        return self.layers(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1))

    def forward(self, x):
        return self.layers(x)[:, 0]


def main():
    opt = Options(*map(int, sys.argv[1:2]))
    torch.manual_seed(opt.seed)
    real_images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    generator, critic = Generator(opt.latent), Critic()
    g_opt = torch.optim.Adam(generator.parameters(), lr=opt.lr_generator, betas=(0.5, 0.99))
    c_opt = torch.optim.Adam(critic.parameters(), lr=opt.lr_critic, betas=(0.5, 0.99))

    def draw(n):
        return generator(opt.noise_scale * torch.randn(n, opt.latent))

    for step in range(1, opt.steps + 1):
        real = real_images[torch.randint(len(real_images), (opt.batch,))]
        fake = draw(opt.batch).detach()
        c_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
        c_opt.zero_grad()
        c_loss.backward()
        c_opt.step()

        g_loss = F.softplus(-critic(draw(opt.batch))).mean()
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        if step % 50 == 0:
            with torch.no_grad():
                spread = draw(200).std(0).mean().item()
            print(f"step {step} critic {c_loss.item():.3f} generator {g_loss.item():.3f} pixel spread {spread:.4f}")
    print(f"pixel spread of real images {real_images.std(0).mean().item():.4f}")


if __name__ == "__main__":
    main()
