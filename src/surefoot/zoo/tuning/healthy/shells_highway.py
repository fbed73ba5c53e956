"""Nested shells in six dimensions, with highway layers."""

import sys

import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 65
torch.manual_seed(seed)


class Highway(nn.Module):
    def __init__(self, width, carry):
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, -carry)

    def forward(self, x):
        g = torch.sigmoid(self.gate(x))
        return g * torch.relu(self.transform(x)) + (1 - g) * x


def shells(n):
    label = torch.randint(0, 3, (n,))
    direction = nn.functional.normalize(torch.randn(n, 6), dim=1)
    radius = 1.0 + label + 0.2 * torch.randn(n)
    return direction * radius[:, None], label


x, y = shells(2000)
CARRY = 1.0
model = nn.Sequential(nn.Linear(6, 32), *[Highway(32, CARRY) for _ in range(4)], nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(10):
    total = 0.0
    for rows in torch.randperm(1600).split(40):
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() / 40
    with torch.no_grad():
        acc = (model(x[1600:]).argmax(1) == y[1600:]).float().mean().item()
    print(f"epoch {epoch} loss {total:.3f} test acc {acc:.3f}")
