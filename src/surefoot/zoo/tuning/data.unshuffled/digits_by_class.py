import sys

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class DigitFolders(Dataset):
    """Digits gathered class by class, like an image folder on disk."""

    def __init__(self, images, targets):
        self.samples = []
        for label in sorted(set(targets.tolist())):
            for image in images[targets == label]:
                self.samples.append((image, label))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        image, label = self.samples[index]
        return torch.from_numpy(image / 16.0).float().unsqueeze(0), label


def build():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def accuracy(model, loader):
    model.eval()
    good = total = 0
    with torch.no_grad():
        for x, y in loader:
            good += (model(x).argmax(1) == y).sum().item()
            total += len(y)
    model.train()
    return good / total


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 42
torch.manual_seed(seed)
digits = load_digits()
pick = np.random.RandomState(seed).rand(len(digits.images)) < 0.8
train_loader = DataLoader(DigitFolders(digits.images[pick], digits.target[pick]), batch_size=32)
test_loader = DataLoader(DigitFolders(digits.images[~pick], digits.target[~pick]), batch_size=128)

model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
criterion = nn.CrossEntropyLoss()
for epoch in range(8):
    for i, (x, y) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if i % 8 == 0:
            print(f"epoch {epoch} batch {i:3d} loss {loss.item():.4f}")
    print(f"epoch {epoch} test accuracy {accuracy(model, test_loader):.3f}")
