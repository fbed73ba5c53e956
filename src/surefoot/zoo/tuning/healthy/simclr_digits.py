"""Contrastive pretraining with noise and shift augmentations, then a nearest-neighbour check."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 31
torch.manual_seed(seed)
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
labels = digits.target

encoder = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()
)
projector = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 32))
optimizer = torch.optim.Adam([*encoder.parameters(), *projector.parameters()], lr=2e-3)
TEMPERATURE = 0.2


def augment(x):
    dx, dy = torch.randint(-1, 2, (2,)).tolist()
    x = torch.roll(x, (dx, dy), dims=(2, 3))
    x = x * (0.7 + 0.6 * torch.rand(len(x), 1, 1, 1))
    return x + 0.15 * torch.randn_like(x)


def info_nce(a, b):
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    logits = a @ b.T / TEMPERATURE
    target = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


def knn_score():
    with torch.no_grad():
        features = encoder(images).numpy()
    return KNeighborsClassifier(5).fit(features[:1200], labels[:1200]).score(features[1200:], labels[1200:])


step = 0
for epoch in range(8):
    for idx in torch.randperm(len(images)).split(128):
        if len(idx) < 128:
            continue
        view1, view2 = augment(images[idx]), augment(images[idx])
        loss = info_nce(projector(encoder(view1)), projector(encoder(view2)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    print(f"epoch {epoch} step {step} contrastive loss {loss.item():.4f}")
print(f"nearest-neighbour accuracy on the features: {knn_score():.3f}")
