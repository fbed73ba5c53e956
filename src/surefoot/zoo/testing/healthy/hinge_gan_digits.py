"""Hinge GAN with spectral norm on 8x8 digits of one class pair."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
torch.manual_seed(seed)
images, target = load_digits(return_X_y=True)
real_data = torch.tensor(images[target <= 1] / 8.0 - 1.0, dtype=torch.float32)
LATENT = 16

generator = nn.Sequential(
    nn.Linear(LATENT, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 64), nn.Tanh()
)
critic = nn.Sequential(
    spectral_norm(nn.Linear(64, 96)),
    nn.LeakyReLU(0.1),
    spectral_norm(nn.Linear(96, 96)),
    nn.LeakyReLU(0.1),
    spectral_norm(nn.Linear(96, 1)),
)
g_opt = torch.optim.Adam(generator.parameters(), lr=8e-4, betas=(0.0, 0.9))
d_opt = torch.optim.Adam(critic.parameters(), lr=1.6e-3, betas=(0.0, 0.9))


def nearest_real(n=200):
    generator.eval()
    with torch.no_grad():
        fake = generator(torch.randn(n, LATENT))
        distance = torch.cdist(fake, real_data)
        used = distance.argmin(1).unique().numel()
        pairwise = torch.cdist(fake, fake).sum().item() / (n * (n - 1))
    generator.train()
    return distance.min(1).values.mean().item(), used, pairwise


print("before: distance to the nearest image %.2f" % nearest_real()[0])
for step in range(350):
    batch = real_data[torch.randint(len(real_data), (64,))]
    with torch.no_grad():
        fake = generator(torch.randn(64, LATENT))
    d_loss = F.relu(1 - critic(batch)).mean() + F.relu(1 + critic(fake)).mean()
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()

    g_loss = -critic(generator(torch.randn(64, LATENT))).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
    if step % 50 == 0:
        print(f"step {step:3d}  d {d_loss.item():.3f}  g {g_loss.item():+.3f}")
print("after: distance to the nearest image %.2f, %d distinct neighbours, spread %.2f" % nearest_real())
