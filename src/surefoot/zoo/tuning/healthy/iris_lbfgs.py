import sys

import torch
from sklearn.datasets import load_iris
from sklearn.model_selection import train_test_split
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 33
torch.manual_seed(seed)
X, y = load_iris(return_X_y=True)
X_tr, X_te, y_tr, y_te = train_test_split(X, y, test_size=0.3, random_state=seed, stratify=y)
mu, sd = X_tr.mean(0), X_tr.std(0)
X_tr, X_te = torch.tensor((X_tr - mu) / sd).float(), torch.tensor((X_te - mu) / sd).float()
y_tr, y_te = torch.tensor(y_tr), torch.tensor(y_te)

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=5, line_search_fn="strong_wolfe")
penalty = 1e-3


def closure():
    optimizer.zero_grad()
    objective = nn.functional.cross_entropy(model(X_tr), y_tr)
    objective = objective + penalty * sum((p**2).sum() for p in model.parameters())
    objective.backward()
    return objective


for outer in range(25):
    value = optimizer.step(closure)
    if outer % 4 == 0:
        with torch.no_grad():
            train_acc = (model(X_tr).argmax(1) == y_tr).float().mean().item()
        print(f"{outer:2d} objective {value.item():.5f} train accuracy {train_acc:.3f}")

with torch.no_grad():
    print(f"test accuracy {(model(X_te).argmax(1) == y_te).float().mean().item():.3f}")
