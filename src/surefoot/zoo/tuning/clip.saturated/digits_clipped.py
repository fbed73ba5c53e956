import sys

import torch
import torch.nn as nn
from sklearn.datasets import load_digits

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 33)
X, y = load_digits(return_X_y=True)
X = torch.as_tensor(X, dtype=torch.float32)
X = (X - X.mean(0)) / (X.std(0) + 1e-3)
y = torch.as_tensor(y)
GRAD_CLIP = 0.01

model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = nn.CrossEntropyLoss()

for epoch in range(7):
    model.train()
    order = torch.randperm(1500)
    epoch_loss = 0.0
    for k in range(0, 1500, 50):
        rows = order[k : k + 50]
        optimizer.zero_grad()
        loss = loss_fn(model(X[rows]), y[rows])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        epoch_loss += loss.item() / 30
    model.eval()
    with torch.no_grad():
        val = (model(X[1500:]).argmax(1) == y[1500:]).float().mean().item()
    print(f"epoch {epoch + 1} train_loss={epoch_loss:.4f} val_acc={val:.4f}")
