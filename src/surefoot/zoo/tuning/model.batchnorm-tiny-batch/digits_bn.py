import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 46
torch.manual_seed(seed)
X, y = load_digits(return_X_y=True)
perm = torch.randperm(len(X))
X = torch.tensor((X - X.mean()) / X.std(), dtype=torch.float32)[perm]
y = torch.tensor(y)[perm]
BATCH_SIZE = 2
loader = DataLoader(TensorDataset(X[:1000], y[:1000]), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)

model = nn.Sequential(
    nn.Linear(64, 64),
    nn.BatchNorm1d(64),
    nn.ReLU(),
    nn.Linear(64, 64),
    nn.BatchNorm1d(64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    model.train()
    total = 0.0
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    model.eval()
    with torch.no_grad():
        on_train = nn.functional.cross_entropy(model(X[:1000]), y[:1000]).item()
        acc = (model(X[1000:]).argmax(1) == y[1000:]).float().mean().item()
    print(f"epoch {epoch}: train {total / len(loader):.3f} | eval on train {on_train:.3f} | test acc {acc:.3f}")
