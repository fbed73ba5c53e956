"""Convolutional net under a clip norm of 0.1: the clip sets the length of a step, so the rate is high to match."""

import sys

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

MAX_NORM = 0.1


def run(seed):
    torch.manual_seed(seed)
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(images))
    train = TensorDataset(images[order[:1400]], labels[order[:1400]])
    test_images, test_labels = images[order[1400:]], labels[order[1400:]]
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=10 * 22)
    for epoch in range(10):
        net.train()
        total = 0.0
        for x, y in DataLoader(train, batch_size=64, shuffle=True):
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            total += loss.item() * len(x)
        net.eval()
        with torch.no_grad():
            right = (net(test_images).argmax(1) == test_labels).float().mean().item()
        print(f"epoch {epoch} loss {total / len(train):.4f} accuracy {right:.3f}")


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 55)
