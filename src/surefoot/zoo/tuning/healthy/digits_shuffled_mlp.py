import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_data(seed):
    X, y = load_digits(return_X_y=True)
    X = (X - X.mean()) / X.std()
    X, y = shuffle(X, y, random_state=seed)
    X = torch.tensor(X, dtype=torch.float32)
    y = torch.tensor(y, dtype=torch.long)
    n = int(0.8 * len(X))
    return TensorDataset(X[:n], y[:n]), TensorDataset(X[n:], y[n:])


def train_one_epoch(model, loader, optimizer, criterion):
    model.train()
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.mean(losses)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hits = [(model(x).argmax(1) == y).float() for x, y in loader]
    return torch.cat(hits).mean().item()


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1234
    torch.manual_seed(seed)
    train_set, test_set = get_data(seed)
    train_loader = DataLoader(train_set, batch_size=48, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=256)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(10):
        train_loss = train_one_epoch(model, train_loader, optimizer, criterion)
        print(f"epoch {epoch + 1:2d} train loss {train_loss:.4f} test acc {evaluate(model, test_loader):.3f}")
