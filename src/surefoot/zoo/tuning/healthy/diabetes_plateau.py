import sys

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 42
torch.manual_seed(SEED)

X, y = load_diabetes(return_X_y=True)
X_tr, X_va, y_tr, y_va = train_test_split(X, y, test_size=0.2, random_state=SEED)
xs, ys = StandardScaler().fit(X_tr), StandardScaler().fit(y_tr[:, None])
to = lambda a: torch.tensor(a, dtype=torch.float32)
train_loader = DataLoader(
    TensorDataset(to(xs.transform(X_tr)), to(ys.transform(y_tr[:, None]))), batch_size=32, shuffle=True
)
x_val, y_val = to(xs.transform(X_va)), to(ys.transform(y_va[:, None]))

model = nn.Sequential(nn.Linear(10, 8), nn.ELU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)
mse = nn.MSELoss()

history = []
for epoch in range(1, 41):
    model.train()
    losses = []
    for xb, yb in train_loader:
        optimizer.zero_grad()
        loss = mse(model(xb), yb)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        val = mse(model(x_val), y_val).item()
    scheduler.step(val)
    history.append(val)
    if epoch % 5 == 0 or epoch == 1:
        lr = optimizer.param_groups[0]["lr"]
        print(f"Epoch {epoch:02d}  train {sum(losses) / len(losses):.4f}  val {val:.4f}  lr {lr:.5f}")

print(f"best validation MSE (standardised): {min(history):.3f}")
