import sys

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from torch.utils.data import DataLoader, TensorDataset

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 7
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

X, y = load_breast_cancer(return_X_y=True)
order = rng.permutation(len(X))
X, y = X[order], y[order]

# the measurements are skewed, work with their logarithm
X = np.log(X)
X_train, X_test = X[:450], X[450:]
y_train, y_test = y[:450], y[450:]

X_train = torch.tensor(X_train, dtype=torch.float32)
X_test = torch.tensor(X_test, dtype=torch.float32)
y_train = torch.tensor(y_train)
y_test = torch.tensor(y_test)

model = nn.Sequential(
    nn.BatchNorm1d(30),
    nn.Linear(30, 32),
    nn.ReLU(),
    nn.Linear(32, 2),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(TensorDataset(X_train, y_train), batch_size=32, shuffle=True)

for epoch in range(15):
    model.train()
    total = 0.0
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(xb)
    model.eval()
    with torch.no_grad():
        acc = (model(X_test).argmax(1) == y_test).float().mean().item()
    print(f"epoch {epoch + 1:2d}  loss {total / len(X_train):.4f}  test accuracy {acc:.3f}")
