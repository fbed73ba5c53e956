import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.drop = nn.Dropout(0.6)
        self.fc1 = nn.Linear(256, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        x = F.relu(self.fc1(self.drop(x)))
        return self.fc2(self.drop(x))


def train(model, optimizer, x, y):
    model.train()
    for rows in torch.randperm(len(x)).split(50):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, x, y):
    model.eval()
    correct, loss = 0, 0.0
    for xb, yb in zip(x.split(100), y.split(100)):
        out = model(xb)
        loss += F.cross_entropy(out, yb, reduction="sum").item()
        correct += (out.argmax(1) == yb).sum().item()
    return loss / len(x), correct / len(x)


def main():
    torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 35)
    d = load_digits()
    order = torch.randperm(len(d.target))
    x = torch.tensor(d.images, dtype=torch.float32)[order, None] / 16
    y = torch.tensor(d.target)[order]
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(1, 9):
        train_loss = train(model, optimizer, x[:1400], y[:1400])
        test_loss, acc = test(model, x[1400:], y[1400:])
        print(f"epoch {epoch} train {train_loss:.3f} test {test_loss:.3f} accuracy {acc:.3f}")


if __name__ == "__main__":
    main()
