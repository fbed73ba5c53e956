import sys
import warnings

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)

data = load_diabetes(scaled=True)
X = torch.tensor(data.data, dtype=torch.float32) * 21
y = torch.tensor(data.target, dtype=torch.float32)
y = (y - y.mean()) / y.std()

perm = torch.randperm(len(X))
train, test = perm[:360], perm[360:]
loader = DataLoader(TensorDataset(X[train], y[train]), batch_size=36, shuffle=True)

model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for epoch in range(30):
    epoch_loss = 0.0
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item()
    if (epoch + 1) % 5 == 0:
        print(f"epoch {epoch + 1:3d}: mse {epoch_loss / len(loader):.4f}")

with torch.no_grad():
    pred = model(X[test]).numpy().ravel()
truth = y[test].numpy()
r2 = 1 - ((pred - truth) ** 2).sum() / ((truth - truth.mean()) ** 2).sum()
print(f"test R2: {r2:.3f}")
