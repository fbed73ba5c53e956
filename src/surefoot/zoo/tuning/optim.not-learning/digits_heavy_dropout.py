import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
pixels, digits = load_digits(return_X_y=True)
x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)

model = nn.Sequential(
    nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.98), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.98), nn.Linear(32, 10)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(10):
    for rows in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
