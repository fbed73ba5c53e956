"""Reads out the letter a pointer stands on, with hand-written post-norm blocks."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class PostNormBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.h, self.dk = heads, d // heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def split(self, x):
        b, t, _ = x.shape
        return x.view(b, t, self.h, self.dk).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.dk)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.n1(x + self.o(mixed))
        return self.n2(x + self.down(F.relu(self.up(x))))


class Reader(nn.Module):
    def __init__(self, letters, d=32, depth=6, heads=2):
        super().__init__()
        self.letter = nn.Embedding(letters, d)
        self.pointer = nn.Parameter(torch.randn(d))
        self.layers = nn.ModuleList([PostNormBlock(d, heads) for _ in range(depth)])
        self.head = nn.Linear(d, letters)

    def forward(self, ids, at):
        x = self.letter(ids)
        x = x + F.one_hot(at, ids.shape[1]).unsqueeze(-1) * self.pointer
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=160)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = Reader(16)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    def schedule(t):
        return min(1.0, (t + 1) / args.warmup) * (0.51 + 0.49 * math.cos(math.pi * t / args.steps))

    sched = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    for step in range(args.steps):
        ids = torch.randint(0, 16, (32, 8))
        at = torch.randint(0, 8, (32,))
        loss = F.cross_entropy(model(ids, at), ids.gather(1, at[:, None])[:, 0])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"{step:4d} loss {loss.item():.3f} lr {sched.get_last_lr()[0]:.1e}")


if __name__ == "__main__":
    main()
