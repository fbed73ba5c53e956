import sys

import torch
import torch.nn as nn
from sklearn.datasets import load_digits

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
torch.manual_seed(seed)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3
labels = torch.tensor(digits.target)
perm = torch.randperm(len(images))
images, labels = images[perm], labels[perm]
train_images, train_labels = images[:1536], labels[:1536]
test_images, test_labels = images[1536:], labels[1536:]

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(16 * 16, 10),
)
criterion = nn.CrossEntropyLoss(reduction="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(12):
    total = 0.0
    for batch in torch.randperm(len(train_images)).split(128):
        optimizer.zero_grad()
        loss = criterion(model(train_images[batch]), train_labels[batch])
        loss.backward()
        optimizer.step()
        total += loss.item()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    print(f"epoch {epoch}: loss {total / len(train_images):.4f}, accuracy {accuracy:.3f}")
