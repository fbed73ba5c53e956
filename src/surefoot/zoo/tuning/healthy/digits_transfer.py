"""Pretrain a small conv net on digits 0-4, then reuse its features for digits 5-9."""

import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(seed)

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
labels = torch.tensor(labels)


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(32 * 4 * 4, num_classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def train(model, x, y, epochs, lr):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params, lr=lr)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        model.head.train()
        model.backbone.train(any(p.requires_grad for p in model.backbone.parameters()))
        total = 0.0
        for idx in torch.randperm(len(x)).split(32):
            loss = criterion(model(x[idx]), y[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(idx)
        print(f"  epoch {epoch + 1}: loss {total / len(x):.4f}")


@torch.no_grad()
def accuracy(model, x, y):
    model.eval()
    return (model(x).argmax(1) == y).float().mean().item()


low = labels < 5
model = Net(5)
print("pretraining on 0-4")
train(model, images[low], labels[low], epochs=4, lr=2e-3)

x_train, x_test, y_train, y_test = train_test_split(
    images[~low], labels[~low] - 5, test_size=0.3, random_state=seed, stratify=labels[~low]
)
for p in model.backbone.parameters():
    p.requires_grad_(False)
model.head = nn.Linear(32 * 4 * 4, 5)
print("training a new head on 5-9")
train(model, x_train, y_train, epochs=10, lr=2e-3)
print(f"test accuracy on 5-9: {accuracy(model, x_test, y_test):.3f}")
