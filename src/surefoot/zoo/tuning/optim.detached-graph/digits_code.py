import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributions import Normal, kl_divergence


class VAE(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
        self.mu, self.log_std = nn.Linear(128, latent), nn.Linear(128, latent)
        self.dec = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        h = self.enc(x)
        q = Normal(self.mu(h), self.log_std(h).clamp(-5, 2).exp())
        z = q.sample()
        return self.dec(z), q


torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
model = VAE()
prior = Normal(0.0, 1.0)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(12):
    total = 0.0
    for batch in torch.utils.data.DataLoader(images, 64, shuffle=True):
        logits, q = model(batch)
        rec = F.binary_cross_entropy_with_logits(logits, batch, reduction="none").sum(1)
        kl = kl_divergence(q, prior).sum(1)
        loss = (rec + 0.1 * kl).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if epoch % 5 == 0:
        print(f"epoch {epoch}: loss {total / 29:.3f}")
