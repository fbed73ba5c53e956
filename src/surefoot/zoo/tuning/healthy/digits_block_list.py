import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DeepNet(nn.Module):
    def __init__(self, width=48, depth=3):
        super().__init__()
        self.depth = depth
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64 if i == 0 else width, width), nn.ReLU()) for i in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 18)
X, y = load_digits(return_X_y=True)
X = torch.tensor((X - X.mean()) / X.std(), dtype=torch.float32)
data = TensorDataset(X, torch.tensor(y))
train_set, test_set = torch.utils.data.random_split(data, [1400, 397])
train_loader = DataLoader(train_set, batch_size=40, shuffle=True)

net = DeepNet()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(8):
    total = 0.0
    for xb, yb in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(xb), yb)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total / len(train_loader):.4f}")

xt, yt = next(iter(DataLoader(test_set, batch_size=397)))
print("test accuracy", (net(xt).argmax(1) == yt).float().mean().item())
