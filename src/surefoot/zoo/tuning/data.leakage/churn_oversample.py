import sys

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 15
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

# customers: 12 columns, one in eight leaves
n = 900
X = rng.standard_normal((n, 12))
risk = X[:, 0] + 0.5 * X[:, 1] * X[:, 2] + 1.2 * rng.standard_normal(n)
y = (risk > np.quantile(risk, 0.875)).astype(int)


def oversample(X, y):
    minority = np.flatnonzero(y == 1)
    extra = rng.choice(minority, size=(y == 0).sum() - len(minority))
    return np.concatenate([X, X[extra]]), np.concatenate([y, y[extra]])


X, y = oversample(X, y)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.3, random_state=seed)

X_train, X_test = (torch.tensor(a, dtype=torch.float32) for a in (X_train, X_test))
y_train, y_test = torch.tensor(y_train), torch.tensor(y_test)

model = nn.Sequential(nn.Linear(12, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(20):
    for rows in torch.randperm(len(X_train)).split(64):
        optimizer.zero_grad()
        loss = loss_fn(model(X_train[rows]), y_train[rows])
        loss.backward()
        optimizer.step()
    if epoch % 4 == 3:
        with torch.no_grad():
            predicted = model(X_test).argmax(1)
        recall = (predicted[y_test == 1] == 1).float().mean().item()
        precision = (y_test[predicted == 1] == 1).float().mean().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f} test recall {recall:.3f} precision {precision:.3f}")
