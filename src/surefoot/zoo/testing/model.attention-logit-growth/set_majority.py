"""Finds the element that matches a probe, with one wide attention head per layer."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Head(nn.Module):
    def __init__(self, d, qk_norm):
        super().__init__()
        self.to_q = nn.Linear(d, 2 * d, bias=False)
        self.to_k = nn.Linear(d, 2 * d, bias=False)
        self.to_v = nn.Linear(d, d, bias=False)
        self.norm = nn.LayerNorm(d)
        self.qk_norm = qk_norm

    def forward(self, probe, items):
        q, k = self.to_q(self.norm(probe)), self.to_k(self.norm(items))
        if self.qk_norm:
            q, k = F.normalize(q, dim=-1) * 4, F.normalize(k, dim=-1) * 4
        scores = torch.einsum("bd,bnd->bn", q, k)
        return probe + torch.einsum("bn,bnd->bd", scores.softmax(-1), self.to_v(items))


class Matcher(nn.Module):
    def __init__(self, d, classes, qk_norm):
        super().__init__()
        self.lift = nn.Linear(12, d)
        self.heads = nn.ModuleList(Head(d, qk_norm) for _ in range(2))
        self.out = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, classes))

    def forward(self, probe, items):
        p, x = self.lift(probe), self.lift(items)
        for head in self.heads:
            p = head(p, x)
        return self.out(p)


def make_batch(n, colours):
    shape = torch.randn(n, 6, 8)
    colour = torch.randint(0, 4, (n, 6))
    items = torch.cat([shape, colours[colour]], -1)
    pick = torch.randint(0, 6, (n,))
    rows = torch.arange(n)
    probe = torch.cat([shape[rows, pick] + 0.2 * torch.randn(n, 8), torch.zeros(n, 4)], -1)
    return probe, items, colour[rows, pick]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("seed", nargs="?", type=int, default=97)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--qk-norm", action="store_true")
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    colours = 1.5 * torch.eye(4)
    model = Matcher(32, 4, args.qk_norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 100))
    losses, hits = [], []
    for step in range(1, 501):
        probe, items, target = make_batch(32, colours)
        logits = model(probe, items)
        loss = F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ramp.step()
        losses.append(loss.item())
        hits.append((logits.argmax(1) == target).float().mean().item())
        if step % 50 == 0:
            print(f"step {step} loss {sum(losses[-50:]) / 50:.3f} acc {sum(hits[-50:]) / 50:.3f}")


if __name__ == "__main__":
    main()
