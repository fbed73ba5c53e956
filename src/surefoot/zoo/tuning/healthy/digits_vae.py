"""Variational autoencoder on 8x8 digits: pixel likelihood summed, KL a small part of the total."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
        self.mu, self.logvar = nn.Linear(128, latent), nn.Linear(128, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(z), mu, logvar


def elbo_terms(logits, x, mu, logvar):
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
    return reconstruction, kl


def main():
    torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    x = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    loader = DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(16):
        sums = [0.0, 0.0]
        for (batch,) in loader:
            logits, mu, logvar = model(batch)
            reconstruction, kl = elbo_terms(logits, batch, mu, logvar)
            loss = reconstruction + 0.5 * kl
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums[0] += reconstruction.item()
            sums[1] += kl.item()
        if epoch % 3 == 0:
            print(f"epoch {epoch:2d}  reconstruction {sums[0] / len(loader):.3f}  kl {sums[1] / len(loader):.3f}")
    with torch.no_grad():
        samples = torch.sigmoid(model.decoder(torch.randn(16, 8)))
    print(f"sampled images: mean pixel {samples.mean().item():.3f}, data {x.mean().item():.3f}")


if __name__ == "__main__":
    main()
