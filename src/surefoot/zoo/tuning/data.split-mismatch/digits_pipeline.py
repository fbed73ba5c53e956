import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


def to_tensor(image):
    return torch.from_numpy(image).float().view(1, 8, 8)


def scale(tensor):
    return (tensor / 16.0 - 0.3) / 0.38


class Digits(Dataset):
    def __init__(self, images, labels, transforms):
        self.images, self.labels, self.transforms = images, labels, transforms

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        for transform in self.transforms:
            image = transform(image)
        return image, int(self.labels[i])


def main(seed):
    torch.manual_seed(seed)
    digits = load_digits()
    order = np.random.RandomState(seed).permutation(len(digits.images))
    train_idx, test_idx = order[:1300], order[1300:]
    train_set = Digits(digits.images[train_idx], digits.target[train_idx], [to_tensor, scale])
    test_set = Digits(digits.images[test_idx], digits.target[test_idx], [to_tensor])
    train_loader = DataLoader(train_set, batch_size=50, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=100)

    model = nn.Sequential(
        nn.Conv2d(1, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12 * 36, 10),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(6):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
        model.eval()
        test_loss = correct = 0.0
        with torch.no_grad():
            for images, labels in test_loader:
                logits = model(images)
                test_loss += criterion(logits, labels).item() * len(labels)
                correct += (logits.argmax(1) == labels).sum().item()
        n = len(test_set)
        print(f"epoch {epoch}: train {loss.item():.4f} | test {test_loss / n:.4f} accuracy {correct / n:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
