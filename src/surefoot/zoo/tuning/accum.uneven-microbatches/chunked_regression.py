import sys

import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 20
torch.manual_seed(seed)
x = torch.randn(2600, 15)
y = torch.relu(x @ torch.randn(15, 6)) @ torch.randn(6, 1) / 4 + 0.7 * torch.randn(2600, 1)
net = nn.Sequential(nn.Linear(15, 40), nn.ReLU(), nn.Linear(40, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
BATCH, MICRO = 65, 32

for epoch in range(8):
    epoch_loss = 0.0
    for batch in torch.randperm(len(x)).split(BATCH):
        opt.zero_grad()
        pieces = batch.split(MICRO)
        batch_loss = 0.0
        for rows in pieces:
            error = net(x[rows]) - y[rows]
            loss = error.pow(2).mean() / len(pieces)
            loss.backward()
            batch_loss += loss.item()
        opt.step()
        epoch_loss += batch_loss / (len(x) / BATCH)
    with torch.no_grad():
        full = (net(x) - y).pow(2).mean().item()
    print(f"epoch {epoch}: running {epoch_loss:.4f}, full data {full:.4f}")
