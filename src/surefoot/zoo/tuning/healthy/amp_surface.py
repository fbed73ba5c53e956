import sys

import torch
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 127)
x = torch.randn(2000, 8)
y = 5 * torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs(), torch.sin(x[:, 3])], 1)

model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)


def train_step(rows):
    with torch.autocast("cpu", dtype=torch.float16):
        prediction = model(x[rows])
    loss = (prediction.float() - y[rows]).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


for epoch in range(10):
    losses = [train_step(rows) for rows in torch.randperm(2000).split(50)]
    print(f"epoch {epoch} mse {sum(losses) / len(losses):.4f}")
