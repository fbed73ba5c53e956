"""WGAN with gradient penalty on two moons."""

import sys

import torch
from sklearn.datasets import make_moons
from torch import nn, optim

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(seed)

points, _ = make_moons(2000, noise=0.05, random_state=seed)
points = torch.tensor(points, dtype=torch.float32)
points = (points - points.mean(0)) / points.std(0)
Z, LAMBDA, CRITIC_STEPS, BATCH = 4, 1.0, 3, 128


def mlp(n_in, n_out):
    return nn.Sequential(
        nn.Linear(n_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, n_out)
    )


G, D = mlp(Z, 2), mlp(2, 1)
opt_g = optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_d = optim.Adam(D.parameters(), lr=1e-3, betas=(0.0, 0.9))


def gradient_penalty(real, fake):
    mix = torch.rand(real.shape[0], 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_(True)
    (grad,) = torch.autograd.grad(D(between).sum(), between, create_graph=True)
    return ((grad.norm(2, dim=1) - 1) ** 2).mean()


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


with torch.no_grad():
    print(f"energy distance at the start: {energy_distance(points[:500], G(torch.randn(500, Z))):.4f}")

for it in range(250):
    for _ in range(CRITIC_STEPS):
        real = points[torch.randint(len(points), (BATCH,))]
        fake = G(torch.randn(BATCH, Z)).detach()
        d_loss = D(fake).mean() - D(real).mean() + LAMBDA * gradient_penalty(real, fake)
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
    g_loss = -D(G(torch.randn(BATCH, Z))).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if it % 50 == 0:
        print(f"iter {it:3d}  critic {d_loss.item():+.3f}  generator {g_loss.item():+.3f}")

with torch.no_grad():
    print(f"energy distance at the end: {energy_distance(points[:500], G(torch.randn(500, Z))):.4f}")
