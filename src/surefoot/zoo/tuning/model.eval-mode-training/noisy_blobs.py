import sys

import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 27
torch.manual_seed(seed)

centers = torch.randn(4, 40)
label = torch.randint(0, 4, (1300,))
points = centers[label] * 0.5 + torch.randn(1300, 40)
train_x, train_y = points[:300], label[:300].clone()
wrong = torch.rand(300) < 0.3
train_y[wrong] = torch.randint(0, 4, (int(wrong.sum()),))
val_x, val_y = points[300:], label[300:]

model = nn.Sequential(
    nn.Linear(40, 256),
    nn.BatchNorm1d(256),
    nn.ReLU(),
    nn.Dropout(0.6),
    nn.Linear(256, 256),
    nn.ReLU(),
    nn.Dropout(0.6),
    nn.Linear(256, 4),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()


def validate():
    model.eval()
    with torch.no_grad():
        out = model(val_x)
        return criterion(out, val_y).item(), (out.argmax(1) == val_y).float().mean().item()


print("before training: loss %.3f acc %.3f" % validate())
for epoch in range(33):
    running = 0.0
    for rows in torch.randperm(300).split(30):
        loss = criterion(model(train_x[rows]), train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item() / 10
    val_loss, val_acc = validate()
    if epoch % 8 == 0:
        print(f"epoch {epoch:2d} train {running:.3f} val {val_loss:.3f} acc {val_acc:.3f}")
