import os
import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 149
torch.manual_seed(seed)
X, y = load_digits(return_X_y=True)
X = torch.tensor((X - X.mean()) / X.std(), dtype=torch.float32)
y = torch.tensor(y)
EPOCHS, STOP = 9, 7


def create():
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.6)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, epochs):
    for epoch in epochs:
        total = 0.0
        for rows in torch.randperm(1500).split(25):
            loss = nn.functional.cross_entropy(model(X[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() / 60
        print(f"epoch {epoch:2d} loss {total:.4f} lr {optimizer.param_groups[0]['lr']:.5f}")
        scheduler.step()


path = os.path.join(tempfile.mkdtemp(), "model.pt")
model, optimizer, scheduler = create()
train(model, optimizer, scheduler, range(STOP))
torch.save(
    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, path
)

model, optimizer, scheduler = create()
state = torch.load(path)
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
scheduler.load_state_dict(state["scheduler"])
os.remove(path)
os.rmdir(os.path.dirname(path))
print("loaded the checkpoint")
train(model, optimizer, scheduler, range(STOP, EPOCHS))
with torch.no_grad():
    print("accuracy", (model(X[1500:]).argmax(1) == y[1500:]).float().mean().item())
