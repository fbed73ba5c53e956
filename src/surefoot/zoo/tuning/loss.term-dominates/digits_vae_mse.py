import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 6
torch.manual_seed(seed)
np.random.seed(seed)

x_all = load_digits().images.astype(np.float32)[:, None] / 16
np.random.shuffle(x_all)
x_train, x_valid = torch.from_numpy(x_all[:1500]), torch.from_numpy(x_all[1500:])


class ConvVAE(nn.Module):
    def __init__(self, z=8):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ELU(), nn.Flatten())
        self.to_stats = nn.Linear(256, 2 * z)
        self.from_z = nn.Linear(z, 256)
        self.up = nn.Sequential(nn.ELU(), nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1))

    def forward(self, x):
        mean, log_var = self.to_stats(self.down(x)).chunk(2, dim=1)
        std = (log_var / 2).exp()
        z = mean + std * torch.randn_like(std)
        return self.up(self.from_z(z).view(-1, 16, 4, 4)), mean, log_var


model = ConvVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
mse = nn.MSELoss()

for epoch in range(12):
    perm = torch.randperm(len(x_train))
    logs = []
    for idx in perm.split(50):
        x = x_train[idx]
        recon, mean, log_var = model(x)
        recon_loss = mse(recon, x)
        kl_loss = -0.5 * torch.sum(1 + log_var - mean**2 - log_var.exp())
        loss = recon_loss + kl_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logs.append((recon_loss.item(), kl_loss.item()))
    recon_mean, kl_mean = np.mean(logs, axis=0)
    print(f"epoch {epoch + 1}: reconstruction {recon_mean:.4f} kl {kl_mean:.4f}")

with torch.no_grad():
    recon, _, _ = model(x_valid)
    print(f"validation mse {mse(recon, x_valid).item():.4f}, pixel variance {x_valid.var(0).mean().item():.4f}")
