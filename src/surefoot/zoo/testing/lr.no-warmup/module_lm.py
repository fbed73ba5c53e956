"""Character model with hand-written post-norm blocks."""

import argparse
import inspect
import math
import statistics

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

    def forward(self, x, mask):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(self.dk)).masked_fill(mask, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.n1(x + self.o(mixed))
        return self.n2(x + self.down(F.relu(self.up(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocab, d=24, depth=6, heads=2, context=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(0.1 * torch.randn(context, d))
        self.layers = nn.ModuleList([PostNormBlock(d, heads) for _ in range(depth)])
        self.head = nn.Linear(d, vocab)
        self.register_buffer("mask", torch.ones(context, context).triu(1).bool())

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--lr", type=float, default=1.5e-2)
    parser.add_argument("--warmup", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    text = inspect.getsource(statistics)
    alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([alphabet[c] for c in text])
    model = LanguageModel(len(alphabet))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    cosine = lambda t: 0.52 + 0.48 * math.cos(math.pi * t / 140)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: min(1.0, (t + 1) / args.warmup) * cosine(t))
    for step in range(140):
        starts = torch.randint(len(data) - 17, (12,))
        rows = torch.stack([data[s : s + 17] for s in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 30 == 0 or step == 139:
            print(f"{step:4d} loss {loss.item():.3f} lr {sched.get_last_lr()[0]:.1e}")


if __name__ == "__main__":
    main()
