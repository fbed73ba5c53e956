import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 137)
X, y = load_digits(return_X_y=True)
X = torch.tensor((X - X.mean()) / X.std(), dtype=torch.float32)
y = torch.tensor(y)
model = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
history = []

for epoch in range(8):
    correct = 0
    for rows in torch.randperm(1500).split(30):
        logits = model(X[rows])
        loss = nn.functional.cross_entropy(logits, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss)
        correct += (logits.argmax(1) == y[rows]).sum().item()
    recent = sum(history[-50:]) / 50
    print(f"epoch {epoch}: loss {recent:.4f} train acc {correct / 1500:.3f}")

print(f"best step loss {min(history):.4f}")
