"""Stops half-way, saves everything, builds all objects anew and goes on as if nothing had happened."""

import io
import sys

import torch
from sklearn.datasets import load_wine
from torch import nn

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 5
TOTAL, HALF = 300, 150
torch.manual_seed(SEED)
X, y = load_wine(return_X_y=True)
X = torch.tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
y = torch.tensor(y)
order = torch.randperm(len(X))
train_rows, test_rows = order[:130], order[130:]


def build():
    model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=TOTAL)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, generator, start, stop):
    model.train()
    for step in range(start, stop):
        rows = train_rows[torch.randint(len(train_rows), (16,), generator=generator)]
        loss = nn.functional.cross_entropy(model(X[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}  lr {scheduler.get_last_lr()[0]:.5f}")


model, optimizer, scheduler = build()
generator = torch.Generator().manual_seed(SEED)
train(model, optimizer, scheduler, generator, 0, HALF)

buffer = io.BytesIO()
torch.save(
    {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "generator": generator.get_state(),
        "rng": torch.get_rng_state(),
    },
    buffer,
)
del model, optimizer, scheduler, generator
buffer.seek(0)
saved = torch.load(buffer)

model, optimizer, scheduler = build()
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
scheduler.load_state_dict(saved["scheduler"])
generator = torch.Generator()
generator.set_state(saved["generator"])
torch.set_rng_state(saved["rng"])
train(model, optimizer, scheduler, generator, HALF, TOTAL)

model.eval()
with torch.no_grad():
    print(f"test accuracy {(model(X[test_rows]).argmax(1) == y[test_rows]).float().mean().item():.3f}")
