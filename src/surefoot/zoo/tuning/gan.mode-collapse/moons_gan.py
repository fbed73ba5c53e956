import sys

import torch
from sklearn.datasets import make_moons
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 8
torch.manual_seed(seed)

moons, _ = make_moons(4000, noise=0.06, random_state=seed)
moons = torch.tensor(moons, dtype=torch.float32)
moons = (moons - moons.mean(0)) / moons.std(0)


def mlp(n_in, n_out):
    return nn.Sequential(
        nn.Linear(n_in, 48), nn.LeakyReLU(0.1), nn.Linear(48, 48), nn.LeakyReLU(0.1), nn.Linear(48, n_out)
    )


G, D = mlp(6, 2), mlp(2, 1)
g_optimizer = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
loss_fn = nn.BCEWithLogitsLoss()
batch, g_steps, budget = 64, 10, 700
ones, zeros = torch.ones(batch, 1), torch.zeros(batch, 1)

for step in range(1, budget // g_steps + 1):
    real = moons[torch.randint(len(moons), (batch,))]
    fake = G(torch.randn(batch, 6)).detach()
    d_loss = loss_fn(D(real), ones) + loss_fn(D(fake), zeros)
    d_optimizer.zero_grad()
    d_loss.backward()
    d_optimizer.step()
    for _ in range(g_steps):
        g_loss = loss_fn(D(G(torch.randn(batch, 6))), ones)
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
    if step % (70 // g_steps) == 0:
        with torch.no_grad():
            spread = G(torch.randn(500, 6)).std(0).tolist()
        print(
            f"step {step} d {d_loss.item():.3f} g {g_loss.item():.3f} spread {spread[0]:.3f} {spread[1]:.3f} (data 1.0 1.0)"
        )
