import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 59)
X, y = load_digits(return_X_y=True)
X = torch.tensor((X - X.mean()) / X.std(), dtype=torch.float32)
y = torch.tensor(y)


def initialise(layer):
    if isinstance(layer, nn.Linear):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.constant_(layer.bias, -3.0)


model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model.apply(initialise)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()

for epoch in range(8):
    losses = []
    for rows in torch.randperm(1500).split(50):
        loss = loss_fn(model(X[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        acc = (model(X[1500:]).argmax(1) == y[1500:]).float().mean().item()
    print(f"epoch {epoch} loss {sum(losses) / len(losses):.3f} acc {acc:.3f}")
