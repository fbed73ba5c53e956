import sys

import torch
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(seed)
x, y = load_wine(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.3, stratify=y, random_state=seed)
mean, std = x_train.mean(0), x_train.std(0)
x_train, x_test = (torch.tensor((a - mean) / std, dtype=torch.float32) for a in (x_train, x_test))
y_train, y_test = torch.tensor(y_train), torch.tensor(y_test)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(13, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 3))

    def forward(self, x):
        return self.layers(x)


model = MLP()
fast = torch.compile(model, backend="eager")
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(30):
    order = torch.randperm(len(x_train))[:120]
    for rows in order.split(20):
        loss = nn.functional.cross_entropy(fast(x_train[rows]), y_train[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 5 == 0:
        print(f"epoch {epoch:2d}  loss {loss.item():.4f}")
with torch.no_grad():
    print(f"test accuracy {(model(x_test).argmax(1) == y_test).float().mean().item():.3f}")
