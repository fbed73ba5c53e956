import sys

import torch
from sklearn.datasets import load_wine
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
wine = load_wine()
X = torch.tensor(wine.data, dtype=torch.float32)
X = (X - X.mean(0)) / X.std(0)
y = torch.tensor(wine.target)
shuffle = torch.randperm(len(X))
train, test = shuffle[:130], shuffle[130:]


def init(module):
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


layers = [nn.Linear(13, 32), nn.Tanh()]
for _ in range(4):
    layers += [nn.Linear(32, 32), nn.Tanh()]
model = nn.Sequential(*layers, nn.Linear(32, 3))
model.apply(init)

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(1, 26):
    for rows in train[torch.randperm(len(train))].split(13):
        loss = loss_fn(model(X[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 5 == 0:
        with torch.no_grad():
            acc = (model(X[test]).argmax(1) == y[test]).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.4f} test acc {acc:.3f}")
