"""BYOL on the digits: an online net predicts the output of a slowly moving average of itself."""

import copy
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
data, labels = load_digits(return_X_y=True)
x, labels = torch.tensor(data / 16, dtype=torch.float32), torch.tensor(labels)


def encoder():
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 48))


online = encoder()
target = copy.deepcopy(online)
for p in target.parameters():
    p.requires_grad = False
predictor = nn.Sequential(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 48))
optimizer = torch.optim.Adam(list(online.parameters()) + list(predictor.parameters()), lr=1e-3, weight_decay=1e-5)
tau = 0.98


def jitter(batch):
    return batch * (torch.rand_like(batch) > 0.25) * (0.8 + 0.4 * torch.rand(len(batch), 1))


def distance(a, b):
    return 2 - 2 * F.cosine_similarity(a, b, dim=1).mean()


for step in range(301):
    rows = torch.randint(1400, (128,))
    v1, v2 = jitter(x[rows]), jitter(x[rows])
    with torch.no_grad():
        t1, t2 = target(v1), target(v2)
    loss = distance(predictor(online(v1)), t2) + distance(predictor(online(v2)), t1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.lerp_(fast, 1 - tau)
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")

# linear classifier on frozen features
online.eval()
with torch.no_grad():
    features = online(x)
    features = (features - features[:1400].mean(0)) / features[:1400].std(0)
head = nn.Linear(48, 10)
head_optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
for _ in range(150):
    rows = torch.randint(1400, (128,))
    head_loss = F.cross_entropy(head(features[rows]), labels[rows])
    head_optimizer.zero_grad()
    head_loss.backward()
    head_optimizer.step()
with torch.no_grad():
    print(f"linear accuracy {(head(features[1400:]).argmax(1) == labels[1400:]).float().mean().item():.3f}")
