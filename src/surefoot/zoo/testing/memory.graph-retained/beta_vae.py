"""A small VAE on a noisy circle, with smoothed values for the progress line."""

import argparse
import math

import torch
from torch import nn


class VAE(nn.Module):
    def __init__(self, d=8, latent=2):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, 48), nn.Tanh(), nn.Linear(48, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 48), nn.Tanh(), nn.Linear(48, d))

    def forward(self, x):
        mean, log_var = self.enc(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(-1)
        return self.dec(z), kl


class Smoothed:
    def __init__(self, rate=0.95):
        self.rate, self.value = rate, 0.0

    def update(self, new):
        self.value = self.rate * self.value + (1 - self.rate) * new


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("seed", nargs="?", type=int, default=139)
    ap.add_argument("--beta", type=float, default=0.05)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    lift = torch.randn(2, 8)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    meters = {"rec": Smoothed(), "kl": Smoothed()}
    for step in range(1, 401):
        angle = torch.rand(64, 1) * 2 * math.pi
        x = torch.cat([angle.cos(), angle.sin()], 1) @ lift + 0.05 * torch.randn(64, 8)
        output, kl = model(x)
        rec = (output - x).square().sum(-1).mean()
        loss = rec + args.beta * kl.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meters["rec"].update(rec)
        meters["kl"].update(kl.mean())
        if step % 100 == 0:
            print(step, " ".join(f"{name} {m.value:.3f}" for name, m in meters.items()))


if __name__ == "__main__":
    main()
