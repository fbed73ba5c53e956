"""SimSiam: two views, a predictor, no negatives; the target branch is detached."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn


class SimSiam(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, width),
            nn.BatchNorm1d(width, affine=False),
        )
        self.predictor = nn.Sequential(nn.Linear(width, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, width))

    def forward(self, a, b):
        za, zb = self.encoder(a), self.encoder(b)
        pa, pb = self.predictor(za), self.predictor(zb)
        similarity = F.cosine_similarity(pa, zb.detach()) + F.cosine_similarity(pb, za.detach())
        return -similarity.mean() / 2


def view(x):
    keep = (torch.rand_like(x) > 0.2).float()
    return x * keep + 0.1 * torch.randn_like(x)


parser = argparse.ArgumentParser()
parser.add_argument("seed", nargs="?", type=int, default=0)
torch.manual_seed(parser.parse_args().seed)
data, target = load_digits(return_X_y=True)
x = torch.tensor(data / 16, dtype=torch.float32)
model = SimSiam()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
for epoch in range(8):
    model.train()
    total = 0.0
    batches = torch.randperm(1400).split(100)
    for rows in batches:
        loss = model(view(x[rows]), view(x[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    model.eval()
    with torch.no_grad():
        spread = F.normalize(model.encoder(x[:1400]), dim=1).std(0).mean().item()
    print(f"epoch {epoch} loss {total / len(batches):+.4f} spread {spread:.4f}")

with torch.no_grad():
    z = model.encoder(x).numpy()
probe = LogisticRegression(max_iter=300).fit(z[:1400], target[:1400])
print(f"probe accuracy {probe.score(z[1400:], target[1400:]):.3f}")
