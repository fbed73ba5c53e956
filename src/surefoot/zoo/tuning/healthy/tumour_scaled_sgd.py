import sys

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 1)

data = load_breast_cancer()
features = torch.tensor(data.data, dtype=torch.float32)
features = (features - features.mean(0)) / features.std(0)
labels = torch.tensor(data.target, dtype=torch.float32).unsqueeze(1)

shuffled = torch.randperm(len(features))
train_rows, test_rows = shuffled[:455], shuffled[455:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(30, 64)
        self.fc2 = nn.Linear(64, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        return self.out(x)


net = Net()
loss_fn = nn.BCEWithLogitsLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

batch_size = 35
for epoch in range(30):
    perm = train_rows[torch.randperm(len(train_rows))]
    running = 0.0
    for i in range(0, len(perm), batch_size):
        rows = perm[i : i + batch_size]
        optimizer.zero_grad()
        loss = loss_fn(net(features[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        running += loss.item()
    if epoch % 5 == 4:
        print(f"Epoch {epoch + 1}: loss = {running / (len(perm) // batch_size):.4f}")

with torch.no_grad():
    predicted = (net(features[test_rows]) > 0).float()
    print("Test accuracy:", (predicted == labels[test_rows]).float().mean().item())
