import sys

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
bunch = load_digits()
images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 8.0 - 1.0
labels = torch.tensor(bunch.target)
train = DataLoader(TensorDataset(images[:1440], labels[:1440]), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(images[1440:], labels[1440:]), batch_size=128)


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3)
        self.conv2 = nn.Conv2d(12, 24, 3)
        self.fc = nn.Linear(24 * 16, 10)

    def forward(self, x):
        x = self.conv1(x).relu()
        x = self.conv2(x).relu()
        return self.fc(x.flatten(1))


model = SmallCNN()
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.1)

for epoch in range(8):
    model.train()
    running = 0.0
    for batch, target in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        running += loss.item()
    model.eval()
    correct = 0
    with torch.no_grad():
        for batch, target in test:
            correct += (model(batch).argmax(1) == target).sum().item()
    print(f"epoch {epoch}: loss {running / len(train):.3f}, accuracy {correct / 357:.3f}")
