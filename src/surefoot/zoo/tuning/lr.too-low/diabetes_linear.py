import sys

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 4
torch.manual_seed(seed)

X, y = load_diabetes(return_X_y=True, scaled=False)
X = torch.tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32).unsqueeze(1)
train_set, valid_set = random_split(TensorDataset(X, y), [360, len(X) - 360])
train_dl = DataLoader(train_set, batch_size=20, shuffle=True)
valid_dl = DataLoader(valid_set, batch_size=len(valid_set))

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
loss_func = nn.MSELoss()
opt = torch.optim.Adam(model.parameters(), lr=1e-6)

for epoch in range(20):
    model.train()
    for xb, yb in train_dl:
        loss = loss_func(model(xb), yb)
        loss.backward()
        opt.step()
        opt.zero_grad()
    model.eval()
    with torch.no_grad():
        valid = sum(loss_func(model(xb), yb) for xb, yb in valid_dl) / len(valid_dl)
    if epoch % 4 == 3:
        print(epoch, f"valid mse {valid.item():.4f}")
