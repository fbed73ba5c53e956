import sys

import torch
from sklearn.datasets import load_digits

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 2)

X, y = load_digits(return_X_y=True)
X = torch.tensor(X, dtype=torch.float32) / 16
y = torch.tensor(y)
order = torch.randperm(len(X))
X_train, y_train = X[order[:1500]], y[order[:1500]]
X_test, y_test = X[order[1500:]], y[order[1500:]]

W = torch.zeros(64, 10, requires_grad=True)
b = torch.zeros(10, requires_grad=True)


def log_softmax(z):
    z = z - z.max(dim=1, keepdim=True).values
    return z - z.exp().sum(dim=1, keepdim=True).log()


def cross_entropy(z, labels):
    return log_softmax(z)[torch.arange(len(labels)), labels].mean()


optimizer = torch.optim.SGD([W, b], lr=0.2, momentum=0.9)
for step in range(1, 401):
    rows = torch.randint(0, len(X_train), (100,))
    loss = cross_entropy(X_train[rows] @ W + b, y_train[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        acc = ((X_test @ W + b).argmax(1) == y_test).float().mean()
        print(f"step {step}: loss {loss.item():.4f}, test accuracy {acc.item():.3f}")
