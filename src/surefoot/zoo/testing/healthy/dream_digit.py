"""Trains a classifier, then holds it still and draws an image that it takes for a given digit."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 11
torch.manual_seed(seed)
data, labels = load_digits(return_X_y=True)
data, labels = torch.tensor(data / 16, dtype=torch.float32), torch.tensor(labels)

net = nn.Sequential(nn.Linear(64, 96), nn.Softplus(), nn.Linear(96, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(200):
    rows = torch.randint(len(data), (64,))
    loss = F.cross_entropy(net(data[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"classifier step {step:3d}  loss {loss.item():.4f}")

net.requires_grad_(False)
wanted = torch.arange(10)
canvas = torch.full((10, 64), 0.3).requires_grad_()
artist = torch.optim.Adam([canvas], lr=0.02)
with torch.no_grad():
    style = torch.stack([net[1](net[0](data[labels == d])).mean(0) for d in range(10)])

for step in range(151):
    picture = canvas.clamp(0, 1)
    hidden = net[1](net[0](picture))
    grid = picture.view(-1, 8, 8)
    rough = (grid[:, 1:] - grid[:, :-1]).pow(2).mean() + (grid[:, :, 1:] - grid[:, :, :-1]).pow(2).mean()
    loss = F.cross_entropy(net[2](hidden), wanted) + 0.3 * F.mse_loss(hidden, style) + 0.1 * rough
    artist.zero_grad()
    loss.backward()
    artist.step()
    if step % 30 == 0:
        print(f"drawing step {step:3d}  loss {loss.item():.4f}")

with torch.no_grad():
    taken = net(canvas.clamp(0, 1)).argmax(1)
print("taken for:", taken.tolist())
for row in canvas[3].detach().clamp(0, 1).view(8, 8):
    print("".join(" .:*#"[int(4.99 * v)] for v in row))
