import sys

import torch
import torch.nn as nn
from sklearn.datasets import load_digits

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(seed)

X, y = load_digits(return_X_y=True)
X = torch.tensor(X, dtype=torch.float32)
X = (X - X.mean()) / X.std()
y = torch.tensor(y, dtype=torch.long)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
criterion = nn.CrossEntropyLoss()
learning_rate = 0.02
optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)

batch_size = 64
for epoch in range(8):
    idx = torch.randperm(len(X))
    correct, seen, total = 0, 0, 0.0
    for start in range(0, len(X), batch_size):
        b = idx[start : start + batch_size]
        out = model(X[b])
        loss = criterion(out, y[b])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(b)
        correct += (out.argmax(1) == y[b]).sum().item()
        seen += len(b)
    print(f"Epoch [{epoch + 1}/8] Loss: {total / seen:.4f} Acc: {100 * correct / seen:.1f}%")
