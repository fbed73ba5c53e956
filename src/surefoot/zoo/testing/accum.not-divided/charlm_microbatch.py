"""Character-level n-gram network trained with micro-batches."""

import argparse
import inspect
import string
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


class NgramNet(nn.Module):
    def __init__(self, vocab, context, dim=16, width=96):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(context * dim)
        self.hidden = nn.Linear(context * dim, width)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.norm(self.embed(ids).flatten(1))
        return self.out(F.silu(self.hidden(x)))


def micro_batches(windows, size, generator):
    while True:
        for rows in torch.randperm(len(windows), generator=generator).split(size):
            if len(rows) == size:
                yield windows[rows, :-1], windows[rows, -1]


def train(args):
    torch.manual_seed(args.seed)
    text = inspect.getsource(string)
    index = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([index[c] for c in text])
    windows = ids.unfold(0, args.context + 1, 1)
    model = NgramNet(len(index), args.context)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    stream = micro_batches(windows, args.micro, torch.Generator().manual_seed(args.seed))
    log = partial(print, flush=True)
    for update in range(args.updates):
        optimizer.zero_grad()
        mean_loss = 0.0
        for _ in range(args.accumulate):
            context, target = next(stream)
            loss = F.cross_entropy(model(context), target)
            loss.backward()
            mean_loss += loss.item() / args.accumulate
        optimizer.step()
        if update % 25 == 0 or update == args.updates - 1:
            log(f"update {update:3d}  nll {mean_loss:.3f}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("seed", nargs="?", type=int, default=50)
    cli.add_argument("--lr", type=float, default=0.1)
    cli.add_argument("--context", type=int, default=8)
    cli.add_argument("--micro", type=int, default=8)
    cli.add_argument("--accumulate", type=int, default=12)
    cli.add_argument("--updates", type=int, default=126)
    train(cli.parse_args())
