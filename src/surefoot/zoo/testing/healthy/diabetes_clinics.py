import random
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 21
torch.manual_seed(seed)
random.seed(seed)


def read_all():
    raw = load_diabetes(scaled=False)
    x = torch.tensor(raw.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(raw.target, dtype=torch.float32)
    order = torch.randperm(len(x))
    return x[order], y[order]


def standardise(y, clinic):
    return (y - 152.0) / (75.0 if clinic == "north" else 77.0)


def write_shards(x, y, size=24):
    """One shard per clinic, the way they lie in the bucket."""
    clinics = ["east", "west", "south", "harbour", "north", "lake", "forest", "old town", "hill", "river"]
    return [(xs, standardise(ys, c)) for c, xs, ys in zip(clinics, x.split(size), y.split(size))]


def build_model():
    return torch.nn.Sequential(
        torch.nn.Linear(10, 24),
        torch.nn.GELU(),
        torch.nn.Linear(24, 1),
        torch.nn.Flatten(0),
    )


x, y = read_all()
shards = write_shards(x[:240], y[:240])
x_val, y_val = x[240:], standardise(y[240:], "validation")
model = build_model()
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.8)

n = 0
for epoch in range(24):
    random.shuffle(shards)
    for xs, ys in shards:
        loss = F.mse_loss(model(xs), ys)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        if n % 3 == 0:
            print(f"[{n:03d}] loss={loss.item():.4f}")
        n += 1

with torch.no_grad():
    print(f"validation mse {F.mse_loss(model(x_val), y_val).item():.3f}, variance {y_val.var().item():.3f}")
