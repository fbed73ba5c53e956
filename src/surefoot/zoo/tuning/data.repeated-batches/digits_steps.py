import sys

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(seed)
np.random.seed(seed)

X, y = load_digits(return_X_y=True)
perm = np.random.permutation(len(X))
X = torch.tensor(X[perm] / 16.0, dtype=torch.float32)
y = torch.tensor(y[perm])
train_set = TensorDataset(X[:1400], y[:1400])
train_loader = DataLoader(train_set, batch_size=64)
X_val, y_val = X[1400:], y[1400:]

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
loss_fn = nn.CrossEntropyLoss()

max_steps = 400
eval_every = 50
for step in range(1, max_steps + 1):
    inputs, targets = next(iter(train_loader))
    opt.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    opt.step()
    if step % eval_every == 0:
        with torch.no_grad():
            logits = model(X_val)
            val_loss = loss_fn(logits, y_val)
            val_acc = (logits.argmax(1) == y_val).float().mean()
        print(f"step {step}: train {loss.item():.4f} val {val_loss.item():.4f} val_acc {val_acc.item():.3f}")
