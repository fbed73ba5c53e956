"""Matching two views with a sharp temperature, half precision on the similarity."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        return self.body(x)


def similarity(a, b, sharpness):
    with torch.autocast("cpu", dtype=torch.float16):
        scores = (sharpness * a) @ (sharpness * b).t()
    return scores.float() / sharpness**2


def main(args):
    torch.manual_seed(args.seed)
    one, two = Encoder(), Encoder()
    optimizer = torch.optim.Adam([*one.parameters(), *two.parameters()], lr=2e-3)
    mix = torch.randn(10, 10) / 3
    for step in range(args.steps):
        x = torch.randn(64, 10)
        left, right = one(x + 0.05 * torch.randn(64, 10)), two(x @ mix)
        logits = similarity(left, right, args.sharpness)
        loss = F.cross_entropy(logits, torch.arange(64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 or step == args.steps - 1:
            top = (logits.argmax(1) == torch.arange(64)).float().mean().item()
            print(f"step {step:3d} loss {loss.item():.4f} top-1 {top:.3f}")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("seed", type=int, nargs="?", default=107)
    p.add_argument("--sharpness", type=float, default=64.0)
    p.add_argument("--steps", type=int, default=200)
    main(p.parse_args())
