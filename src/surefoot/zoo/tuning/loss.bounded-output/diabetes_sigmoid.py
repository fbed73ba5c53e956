import argparse

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.metrics import r2_score
from torch import nn

parser = argparse.ArgumentParser(description="disease progression after one year")
parser.add_argument("seed", nargs="?", default=23, type=int)
parser.add_argument("--steps", default=400, type=int)
args = parser.parse_args()
torch.manual_seed(args.seed)
rng = np.random.default_rng(args.seed)

X, y = load_diabetes(return_X_y=True, scaled=False)
X = (X - X.mean(0)) / X.std(0)
y = (y - y.mean()) / y.std()
X, y = X.astype(np.float32), y.astype(np.float32)[:, None]
order = rng.permutation(len(X))
train, val = order[:340], order[340:]


class Progression(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(10, 40)
        self.outer = nn.Linear(40, 1)

    def forward(self, x):
        return torch.sigmoid(self.outer(torch.tanh(self.inner(x))))


model = Progression()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(1, args.steps + 1):
    pick = rng.choice(train, 32, replace=False)
    loss = nn.functional.mse_loss(model(torch.from_numpy(X[pick])), torch.from_numpy(y[pick]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        with torch.no_grad():
            guess = model(torch.from_numpy(X[val])).numpy()
        print(f"step {step}: mse {loss.item():.3f} val R2 {r2_score(y[val], guess):.3f}")
