"""Next-character model on the text of a standard library module."""

import argparse
import textwrap
import inspect

import torch
import torch.nn.functional as F
from torch import nn


def load_text():
    source = inspect.getsource(textwrap)
    vocab = sorted(set(source))
    lookup = {c: i for i, c in enumerate(vocab)}
    return torch.tensor([lookup[c] for c in source]), vocab


def sample_batch(data, batch, length, generator):
    starts = torch.randint(0, len(data) - length - 1, (batch,), generator=generator)
    chunk = torch.stack([data[s : s + length + 1] for s in starts])
    return chunk[:, :-1], chunk[:, 1:]


class CharGRU(nn.Module):
    def __init__(self, vocab_size, width=64):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 32)
        self.gru = nn.GRU(32, width, batch_first=True)
        self.out = nn.Linear(width, vocab_size)

    def forward(self, ids):
        hidden, _ = self.gru(self.embed(ids))
        return self.out(hidden)


def train(args):
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    data, vocab = load_text()
    model = CharGRU(len(vocab))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        model.train()
        optimizer.zero_grad()
        total = 0.0
        for step in range(args.steps_per_epoch):
            inputs, targets = sample_batch(data, 16, 24, generator)
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"[{epoch}] train nll {total / args.steps_per_epoch:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int, nargs="?", default=1234)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps-per-epoch", type=int, default=60)
    train(parser.parse_args())
