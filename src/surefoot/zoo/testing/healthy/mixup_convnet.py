"""Mixup and label smoothing: the training loss stays high on purpose, accuracy on clean images does not."""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ALPHA, SMOOTHING = 0.4, 0.1


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.c2, self.b2 = nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24)
        self.fc = nn.Linear(24 * 16, 10)

    def forward(self, x):
        x = F.relu(self.b1(self.c1(x)))
        x = F.relu(self.b2(self.c2(x)))
        return self.fc(x.flatten(1))


def mixup(x, y, rng):
    lam = float(rng.beta(ALPHA, ALPHA))
    partner = torch.randperm(len(x))
    return lam * x + (1 - lam) * x[partner], y, y[partner], lam


def main(seed):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(digits.target)
    order = torch.from_numpy(rng.permutation(len(x)))
    train, test = order[:1400], order[1400:]
    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=64, shuffle=True, num_workers=2)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4)
    for epoch in range(8):
        model.train()
        total = 0.0
        for images, labels in loader:
            mixed, a, b, lam = mixup(images, labels, rng)
            logits = model(mixed)
            loss = lam * F.cross_entropy(logits, a, label_smoothing=SMOOTHING)
            loss = loss + (1 - lam) * F.cross_entropy(logits, b, label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            clean = (model(x[test]).argmax(1) == y[test]).float().mean().item()
        print(f"epoch {epoch}: mixed loss {total / len(loader):.3f}  clean test accuracy {clean:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 44)
