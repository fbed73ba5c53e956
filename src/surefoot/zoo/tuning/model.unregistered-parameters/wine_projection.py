import sys

import torch
from sklearn.datasets import load_wine
from torch import nn


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.width = width
        self.enter = nn.Linear(13, width)
        self.leave = nn.Linear(width, 3)

    def forward(self, x):
        hidden = torch.relu(self.enter(x))
        mixed = nn.Linear(self.width, self.width)(hidden)
        return self.leave(torch.relu(mixed))


torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
X, y = load_wine(return_X_y=True)
X = torch.tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
y = torch.tensor(y)

net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in range(40):
    for rows in torch.randperm(len(X)).split(32):
        loss = nn.functional.cross_entropy(net(X[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 10 == 9:
        print(f"epoch {epoch} loss {loss.item():.4f}")
