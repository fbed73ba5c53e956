import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return torch.from_numpy(self.images[index]).float() / 16 - 0.3, self.labels[index]


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    torch.manual_seed(seed)
    X, y = load_digits(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.25, random_state=seed, stratify=y)
    train = DataLoader(Digits(X_train, y_train), batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)
    test = DataLoader(Digits(X_test, y_test), batch_size=256)

    model = nn.Sequential(
        nn.Linear(64, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    epochs = 12
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.08, epochs=epochs, steps_per_epoch=len(train), pct_start=0.3
    )
    for epoch in range(epochs):
        model.train()
        running = 0.0
        for images, labels in train:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            running += loss.item()
        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test:
                correct += (model(images).argmax(1) == labels).sum().item()
        print(
            f"epoch {epoch + 1:2d} lr {scheduler.get_last_lr()[0]:.4f} "
            f"loss {running / len(train):.4f} test acc {correct / len(X_test):.4f}"
        )
