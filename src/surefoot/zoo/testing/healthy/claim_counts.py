"""Poisson regression of claim counts; the likelihood is summed over the batch as in the actuarial textbooks."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Policies(Dataset):
    def __init__(self, n, rng):
        self.age = rng.uniform(-1, 1, n)
        self.power = rng.uniform(-1, 1, n)
        self.region = rng.integers(0, 6, n)
        effect = np.array([-0.5, -0.2, 0.0, 0.3, 0.6, 0.9])
        self.rate = np.exp(0.4 + 1.1 * self.age**2 - 0.7 * self.power + effect[self.region])
        self.count = rng.poisson(self.rate)

    def __len__(self):
        return len(self.count)

    def __getitem__(self, i):
        x = torch.tensor([self.age[i], self.power[i]], dtype=torch.float32)
        return x, int(self.region[i]), torch.tensor(self.count[i], dtype=torch.float32)


class RateModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.region = nn.Embedding(6, 4)
        self.net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x, region):
        return self.net(torch.cat([x, self.region(region)], dim=1)).squeeze(1)


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 2
rng = np.random.default_rng(seed)
torch.manual_seed(seed)
train, test = Policies(3000, rng), Policies(800, rng)
model = RateModel()
nll = nn.PoissonNLLLoss(log_input=True, reduction="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=2e-4, momentum=0.9)

for epoch in range(12):
    total = 0.0
    for x, region, count in DataLoader(train, batch_size=64, shuffle=True):
        loss = nll(model(x, region), count)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}  summed nll {total:9.1f}")

with torch.no_grad():
    x, region, count = next(iter(DataLoader(test, batch_size=800)))
    rate = model(x, region).exp()
print(f"correlation with the true rate: {np.corrcoef(rate.numpy(), test.rate)[0, 1]:.3f}")
print(f"mean predicted {rate.mean().item():.3f}, mean observed {count.mean().item():.3f}")
