"""Pretrain, then fine-tune everything for a long while at a small learning rate."""

import argparse
import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


def loop(model, x, y, steps, lr, every, tag):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    model.train()
    losses = []
    for step in range(1, steps + 1):
        rows = torch.randint(len(x), (64,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % every == 0:
            print(f"{tag} step {step:4d}  loss {sum(losses[-every:]) / every:.4f}")


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        logits = model(x)
        return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


parser = argparse.ArgumentParser()
parser.add_argument("seed", nargs="?", type=int, default=20)
torch.manual_seed(parser.parse_args().seed)
data, target = load_digits(return_X_y=True)
order = torch.randperm(len(data))
x, y = torch.tensor(data / 16, dtype=torch.float32)[order], torch.tensor(target)[order]
worn = (0.75 * x + 0.1 * torch.randn_like(x)).clamp(0, 1)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
loop(model, x[:1000], y[:1000], 250, 3e-3, 50, "pretrain")
before = copy.deepcopy(model.state_dict())
print("worn images before: loss %.4f accuracy %.3f" % evaluate(model, worn[1400:], y[1400:]))
loop(model, worn[1000:1400], y[1000:1400], 600, 3e-5, 100, "finetune")
print("worn images after: loss %.4f accuracy %.3f" % evaluate(model, worn[1400:], y[1400:]))
moved = sum((model.state_dict()[k] - before[k]).norm() ** 2 for k in before).sqrt().item()
print(f"the weights moved by {moved:.4f}")
