"""Effective batch of 64 out of micro-batches of 16."""

import itertools
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
MICRO, ACCUMULATE, UPDATES = 16, 4, 110

bunch = load_digits()
x = torch.as_tensor(bunch.images, dtype=torch.float32)[:, None] / 16
y = torch.as_tensor(bunch.target)
shuffle = torch.randperm(len(x))
x, y = x[shuffle], y[shuffle]
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]


def stream():
    while True:
        perm = torch.randperm(len(x_train))
        for i in range(0, len(perm) - MICRO + 1, MICRO):
            rows = perm[i : i + MICRO]
            yield x_train[rows], y_train[rows]


net = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.08, momentum=0.9)
feed = stream()
for update in range(UPDATES):
    optimizer.zero_grad()
    total = 0.0
    for xb, yb in itertools.islice(feed, ACCUMULATE):
        loss = nn.functional.cross_entropy(net(xb), yb) / ACCUMULATE
        loss.backward()
        total += loss.item()
    optimizer.step()
    if update % 10 == 0:
        print(f"update {update:3d}  loss {total:.4f}")

net.eval()
with torch.no_grad():
    print(f"test accuracy {(net(x_test).argmax(1) == y_test).float().mean().item():.4f}")
