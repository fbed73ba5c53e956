"""Adapt a pretrained net to inverted images with low-rank updates; the up-projection starts at zero."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.down.T) @ self.up.T


def fit(model, x, y, steps, lr, tag):
    trainable = [p for p in model.parameters() if p.requires_grad]
    count, total = sum(p.numel() for p in trainable), sum(p.numel() for p in model.parameters())
    print(f"{tag}: training {count} of {total} parameters")
    optimizer = torch.optim.AdamW(trainable, lr=lr)
    for step in range(steps):
        rows = torch.randint(len(x), (64,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 60 == 0:
            print(f"  step {step:3d} loss {loss.item():.4f}")


@torch.no_grad()
def accuracy(model, x, y):
    return (model(x).argmax(1) == y).float().mean().item()


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 61
torch.manual_seed(seed)
images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(images))
images, labels = torch.tensor(images / 8 - 1, dtype=torch.float32)[order], torch.tensor(labels)[order]
train, test = slice(0, 1400), slice(1400, None)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
fit(model, images[train], labels[train], 240, 2e-3, "pretraining")
print(f"  as trained {accuracy(model, images[test], labels[test]):.3f}")

shifted = images.view(-1, 8, 8).transpose(1, 2).flatten(1)
print(f"  transposed images, no adaptation {accuracy(model, shifted[test], labels[test]):.3f}")
for i in (0, 2, 4):
    model[i] = LoRALinear(model[i])
fit(model, shifted[train], labels[train], 300, 5e-3, "adapting")
print(f"  transposed images, adapted {accuracy(model, shifted[test], labels[test]):.3f}")
