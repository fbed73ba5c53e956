import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(seed)
pixels, digits = load_digits(return_X_y=True)
train_x, held_x, train_y, held_y = train_test_split(pixels / 16, digits, test_size=0.3, random_state=seed)
held_y = np.sort(held_y)

train_x, held_x = torch.tensor(train_x, dtype=torch.float32), torch.tensor(held_x, dtype=torch.float32)
train_y, held_y = torch.tensor(train_y), torch.tensor(held_y)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss()
for epoch in range(12):
    model.train()
    for rows in torch.randperm(len(train_x)).split(64):
        optimizer.zero_grad()
        loss = criterion(model(train_x[rows]), train_y[rows])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        held = criterion(model(held_x), held_y)
    print(epoch, loss.item(), held.item())
