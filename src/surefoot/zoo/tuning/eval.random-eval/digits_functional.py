import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
train, held = order[:1400], order[1400:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.hidden = nn.Linear(12 * 16, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        x = F.dropout(F.relu(self.hidden(x)), p=0.5)
        return self.out(x)


net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(8):
    net.train()
    for rows in train[torch.randperm(len(train))].split(64):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        logits = net(images[held])
        right = (logits.argmax(1) == labels[held]).float().mean()
        print(epoch, F.cross_entropy(logits, labels[held]).item(), right.item())
