"""Variational autoencoder on the 8x8 digits."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class VAE(nn.Module):
    def __init__(self, latent=6, hidden=64):
        super().__init__()
        self.enc = nn.Linear(64, hidden)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, x):
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def elbo_loss(logits, x, mu, logvar):
    recon = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return recon + kl, recon, kl


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    data = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(1, args.epochs + 1):
        sums = [0.0, 0.0, 0.0]
        for batch in data[torch.randperm(len(data))].split(64):
            logits, mu, logvar = model(batch)
            parts = elbo_loss(logits, batch, mu, logvar)
            optimizer.zero_grad()
            parts[0].backward()
            optimizer.step()
            sums = [s + p.item() * len(batch) for s, p in zip(sums, parts)]
        loss, recon, kl = (s / len(data) for s in sums)
        print(f"epoch {epoch:2d} loss {loss:.3f} recon {recon:.3f} kl {kl:.3f}")


if __name__ == "__main__":
    main()
