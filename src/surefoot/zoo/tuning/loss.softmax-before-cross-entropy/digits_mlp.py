import sys

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 42
torch.manual_seed(seed)

digits = load_digits()
dataset = TensorDataset(
    torch.tensor(digits.data, dtype=torch.float32) / 16,
    torch.tensor(digits.target, dtype=torch.long),
)
train_data, test_data = random_split(dataset, [1437, 360])
train_loader = DataLoader(train_data, batch_size=64, shuffle=True)
test_loader = DataLoader(test_data, batch_size=360)


class DigitClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 64)
        self.relu = nn.ReLU()
        self.output = nn.Linear(64, 10)
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x):
        x = self.relu(self.hidden(x))
        return self.softmax(self.output(x))


model = DigitClassifier()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(12):
    running_loss = 0.0
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    print(f"Epoch [{epoch + 1}/12], Loss: {running_loss / len(train_loader):.4f}")

with torch.no_grad():
    inputs, targets = next(iter(test_loader))
    print(f"Test accuracy: {(model(inputs).argmax(1) == targets).float().mean().item() * 100:.1f}%")
