import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 23
torch.manual_seed(seed)
X, y = load_digits(return_X_y=True)
X = torch.tensor((X - 4.88) / 6.02, dtype=torch.float32)
y = torch.tensor(y)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 10))
model = model.to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=6e-4, momentum=0.9)

for epoch in range(28):
    losses = []
    for rows in torch.randperm(1500).split(25):
        out = model(X[rows].to(torch.bfloat16))
        loss = nn.functional.cross_entropy(out.float(), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if epoch % 4 == 0:
        print(f"epoch {epoch:2d} loss {sum(losses) / len(losses):.4f}")

with torch.no_grad():
    logits = model(X[1500:].to(torch.bfloat16))
print("accuracy", (logits.argmax(1) == y[1500:]).float().mean().item())
