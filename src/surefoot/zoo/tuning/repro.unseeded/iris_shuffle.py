import torch
from sklearn.datasets import load_iris
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

X, y = load_iris(return_X_y=True)
X = torch.tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
y = torch.tensor(y)
order = torch.randperm(len(X))
train, test = order[:110], order[110:]
loader = DataLoader(TensorDataset(X[train], y[train]), batch_size=11, shuffle=True)

model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(15):
    model.train()
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(xb), yb)
        loss.backward()
        optimizer.step()
    if epoch % 3 == 2:
        print(f"epoch {epoch + 1} loss {loss.item():.5f}")
model.eval()
with torch.no_grad():
    print("test accuracy", (model(X[test]).argmax(1) == y[test]).float().mean().item())
