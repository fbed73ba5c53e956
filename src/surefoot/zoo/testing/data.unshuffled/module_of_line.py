"""Guess from which module of the standard library a line of code was taken."""

import argparse
import random
import zlib

import argparse as argparse_module
import ast
import inspect
import tarfile
import textwrap
import typing

import torch
from torch import nn

MODULES = [argparse_module, typing, tarfile, inspect, textwrap, ast]
BUCKETS = 2048


def collect():
    rows = []
    for label, module in enumerate(MODULES):
        lines = [line.strip() for line in inspect.getsource(module).splitlines()]
        rows += [(line, label) for line in lines if len(line) > 25][:700]
    return rows


def features(line):
    grams = [line[i : i + 4] for i in range(len(line) - 3)]
    return torch.tensor([zlib.crc32(g.encode()) % BUCKETS for g in grams])


def collate(rows):
    ids = [features(line) for line, _ in rows]
    offsets = torch.tensor([0] + [len(i) for i in ids[:-1]]).cumsum(0)
    return torch.cat(ids), offsets, torch.tensor([label for _, label in rows])


class LineClassifier(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, 32, mode="mean")
        self.out = nn.Linear(32, n_classes)

    def forward(self, ids, offsets):
        return self.out(self.bag(ids, offsets))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    random.seed(args.seed)

    rows = collect()
    test = rows[::8]
    train = [row for i, row in enumerate(rows) if i % 8]
    model = LineClassifier(len(MODULES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    ids, offsets, test_labels = collate(test)
    for epoch in range(3):
        for step, start in enumerate(range(0, len(train), args.batch)):
            x, off, labels = collate(train[start : start + args.batch])
            loss = nn.functional.cross_entropy(model(x, off), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                print(f"epoch {epoch} step {step:3d} loss {loss.item():.3f}")
        with torch.no_grad():
            acc = (model(ids, offsets).argmax(1) == test_labels).float().mean().item()
        print(f"epoch {epoch} test accuracy {acc:.3f}")


if __name__ == "__main__":
    main()
