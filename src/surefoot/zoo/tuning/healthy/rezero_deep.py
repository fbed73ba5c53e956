"""Twenty residual blocks, each behind a gate that starts at zero."""

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import nn


class GatedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.gate * self.inner(x)


class DeepNet(nn.Module):
    def __init__(self, features, width=32, depth=20):
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.ModuleList([GatedBlock(width) for _ in range(depth)])
        self.head = nn.Linear(width, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


parser = argparse.ArgumentParser()
parser.add_argument("seed", type=int, nargs="?", default=64)
args = parser.parse_args()
torch.manual_seed(args.seed)
X, y = load_breast_cancer(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=args.seed, stratify=y)
mean, std = X_train.mean(0), X_train.std(0)
X_train, X_test = (torch.tensor((a - mean) / std, dtype=torch.float32) for a in (X_train, X_test))
y_train, y_test = torch.tensor(y_train), torch.tensor(y_test)
model = DeepNet(30)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(10):
    model.train()
    for rows in torch.randperm(len(X_train)).split(32):
        loss = nn.functional.cross_entropy(model(X_train[rows]), y_train[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(X_test).argmax(1) == y_test).float().mean().item()
    gates = torch.stack([b.gate.detach().abs() for b in model.blocks]).mean().item()
    print(f"epoch {epoch}  loss {loss.item():.4f}  accuracy {accuracy:.3f}  mean gate {gates:.4f}")
