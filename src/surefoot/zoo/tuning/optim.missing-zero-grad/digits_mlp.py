import sys

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 96)
        self.fc2 = nn.Linear(96, 10)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 7
torch.manual_seed(seed)

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32)
x = (x - x.mean()) / x.std()
y = torch.tensor(digits.target)
perm = torch.randperm(len(x))
train_idx, test_idx = perm[:1400], perm[1400:]
train_loader = DataLoader(TensorDataset(x[train_idx], y[train_idx]), batch_size=32, shuffle=True)

model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(6):
    running = 0.0
    for inputs, labels in train_loader:
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running += loss.item()
    with torch.no_grad():
        acc = (model(x[test_idx]).argmax(1) == y[test_idx]).float().mean().item()
    print(f"epoch {epoch + 1}: loss {running / len(train_loader):.4f}  test acc {acc:.3f}")
