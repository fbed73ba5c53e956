import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.amp import GradScaler, autocast

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 16
torch.manual_seed(seed)
X, y = load_digits(return_X_y=True)
X = torch.tensor((X - X.mean()) / X.std(), dtype=torch.float32)
y = torch.tensor(y)

model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = GradScaler("cpu")
loss_fn = nn.CrossEntropyLoss()

for epoch in range(6):
    total = 0.0
    for rows in torch.randperm(1500).split(50):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = loss_fn(model(X[rows]), y[rows])
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    with torch.no_grad():
        acc = (model(X[1500:]).argmax(1) == y[1500:]).float().mean().item()
    print(f"epoch {epoch} loss {total / 30:.4f} acc {acc:.3f} scale {scaler.get_scale():.0f}")
