import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 14
torch.manual_seed(seed)

X, y = load_digits(return_X_y=True)
X = torch.tensor(X / 16.0 - 0.3, dtype=torch.float32) * 2.6
y = torch.tensor(y)
loader = DataLoader(TensorDataset(X[:1500], y[:1500]), batch_size=5, shuffle=True, drop_last=True)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
accumulation_steps = 12

for epoch in range(5):
    total = 0.0
    optimizer.zero_grad()
    for i, (inputs, labels) in enumerate(loader):
        loss = criterion(model(inputs), labels)
        loss.backward()
        total += loss.item()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        acc = (model(X[1500:]).argmax(1) == y[1500:]).float().mean().item()
    print(f"epoch {epoch}: loss {total / len(loader):.4f}, test accuracy {acc:.3f}")
