"""Learn the distribution of annotator votes for each digit, not only the majority."""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 14
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

images, truth = load_digits(return_X_y=True)
keep = rng.permutation(len(images))[:1200]
images, truth = images[keep] / 16, truth[keep]

confusion = np.full((10, 10), 0.02) + 0.8 * np.eye(10)
votes = np.stack([rng.multinomial(400, confusion[t]) for t in truth])
share = torch.tensor(votes / votes.sum(1, keepdims=True), dtype=torch.float32)
images = torch.tensor(images, dtype=torch.float32)


class VoteNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return torch.log_softmax(self.head(self.trunk(x)), dim=-1)


def kl(target, log_predicted):
    return (torch.xlogy(target, target) - target * log_predicted).sum(-1).mean()


model = VoteNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(300):
    rows = torch.from_numpy(rng.integers(0, 1000, size=32))
    loss = kl(share[rows], model(images[rows]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step:3d} kl {loss.item():.4f}")
with torch.no_grad():
    top = model(images[1000:]).argmax(1) == torch.tensor(truth[1000:])
print(f"majority agreement {top.float().mean().item():.3f}")
