import sys

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 3
rng = np.random.default_rng(seed)
torch.manual_seed(seed)

X, y = load_diabetes(return_X_y=True)
order = rng.permutation(len(X))
X, y = X[order], y[order]
n_train = 350
X = (X - X[:n_train].mean(0)) / X[:n_train].std(0)
y = (y - y[:n_train].mean()) / y[:n_train].std()
X = torch.from_numpy(X).float()
y = torch.from_numpy(y).float().unsqueeze(1)

BATCH = 50
net = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
# summed squared error, so the step size is 0.02 / 50
opt = torch.optim.SGD(net.parameters(), lr=0.02 / BATCH, momentum=0.9)

for epoch in range(25):
    perm = torch.randperm(n_train)
    sse = 0.0
    for start in range(0, n_train, BATCH):
        rows = perm[start : start + BATCH]
        loss = F.mse_loss(net(X[rows]), y[rows], reduction="sum")
        opt.zero_grad()
        loss.backward()
        opt.step()
        sse += loss.item()
    if epoch % 4 == 0:
        with torch.no_grad():
            test_mse = F.mse_loss(net(X[n_train:]), y[n_train:]).item()
        print(f"epoch {epoch:2d}  SSE {sse:8.2f}  test R2 {1 - test_mse / y[n_train:].var().item():.3f}")
