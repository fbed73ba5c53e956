import sys

import torch
from torch import nn
from torch.nn import functional as F
from sklearn.datasets import load_digits

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 0
BATCH = 64
torch.manual_seed(SEED)

raw = load_digits()
images = torch.from_numpy(raw.images).float().unsqueeze(1) / 16.0
targets = torch.from_numpy(raw.target).long()
images = (images - 0.3) / 0.38

order = torch.randperm(len(images))
images, targets = images[order], targets[order]
n_train = 1500

net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Linear(128, 10),
)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)

step = 0
for epoch in range(5):
    shuffled = torch.randperm(n_train)
    for i in range(0, n_train - BATCH + 1, BATCH):
        idx = shuffled[i : i + BATCH]
        loss = F.cross_entropy(net(images[idx]), targets[idx])
        loss.backward()
        opt.zero_grad()
        opt.step()
        if step % 20 == 0:
            print("step", step, "loss", round(loss.item(), 4))
        step += 1

net.eval()
with torch.no_grad():
    pred = net(images[n_train:]).argmax(dim=1)
print("accuracy", (pred == targets[n_train:]).float().mean().item())
