import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 53)
digits = load_digits()
X = torch.tensor(digits.data, dtype=torch.float32)
X = (X - X.mean()) / X.std()
y = torch.tensor(digits.target)

layers, width = [], 64
for _ in range(7):
    linear = nn.Linear(64, width)
    nn.init.xavier_uniform_(linear.weight)
    layers += [linear, nn.Sigmoid()]
model = nn.Sequential(*layers, nn.Linear(width, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

for epoch in range(8):
    total = 0.0
    for rows in torch.randperm(1500).split(50):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X[rows]), y[rows])
        loss.backward()
        optimizer.step()
        total += loss.item() / 30
    with torch.no_grad():
        acc = (model(X[1500:]).argmax(1) == y[1500:]).float().mean().item()
    print(f"epoch {epoch}, loss {total:.4f}, accuracy {acc:.3f}")
