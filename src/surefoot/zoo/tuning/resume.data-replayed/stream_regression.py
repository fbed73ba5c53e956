"""Learns from a stream, is stopped, and goes on with the stream."""

import io
import sys

import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 157
torch.manual_seed(seed)
truth = torch.randn(100, 1) / 10


def stream(start=0):
    generator = torch.Generator().manual_seed(seed)
    count = 0
    while True:
        x = torch.randn(12, 100, generator=generator)
        y = x @ truth + torch.randn(12, 1, generator=generator)
        count += 1
        if count > start:
            yield x, y


def build():
    model = nn.Sequential(nn.Linear(100, 512), nn.ReLU(), nn.Linear(512, 1))
    return model, torch.optim.Adam(model.parameters(), lr=2e-3)


def train(model, optimizer, batches, first, last):
    losses = []
    for step in range(first, last):
        x, y = next(batches)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 40 == 0:
            print(f"step {step + 1} mse {sum(losses[-40:]) / 40:.3f}")


model, optimizer = build()
train(model, optimizer, stream(), 0, 160)
buffer = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 160}, buffer)
buffer.seek(0)

checkpoint = torch.load(buffer)
model, optimizer = build()
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
print("resumed at step", checkpoint["step"])
train(model, optimizer, stream(), checkpoint["step"], 320)
