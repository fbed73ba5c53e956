"""Character model over the source of a few standard modules."""

import inspect
import random
import sys
import tarfile

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class RandomCrops(IterableDataset):
    def __init__(self, ids, length, crops_per_epoch, seed):
        self.ids = ids
        self.length = length
        self.crops_per_epoch = crops_per_epoch
        self.rng = random.Random(seed)

    def __iter__(self):
        rng = self.rng
        for _ in range(self.crops_per_epoch):
            start = rng.randrange(len(self.ids) - self.length - 1)
            piece = self.ids[start : start + self.length + 1]
            yield piece[:-1], piece[1:]


class CharGRU(nn.Module):
    def __init__(self, vocab, width=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, 32)
        self.rnn = nn.GRU(32, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        hidden, _ = self.rnn(self.embed(ids))
        return self.out(hidden)


def evaluate(model, ids, length=48):
    pieces = ids[: 40 * (length + 1)].view(40, length + 1)
    with torch.no_grad():
        logits = model(pieces[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten()).item()


def main(seed=13):
    torch.manual_seed(seed)
    text = inspect.getsource(tarfile)
    chars = sorted(set(text))
    lookup = {c: i for i, c in enumerate(chars)}
    ids = torch.tensor([lookup[c] for c in text])
    cut = int(0.9 * len(ids))
    train_ids, val_ids = ids[:cut], ids[cut:]

    data = RandomCrops(train_ids, length=32, crops_per_epoch=32, seed=seed)
    loader = DataLoader(data, batch_size=16)
    model = CharGRU(len(chars))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    for epoch in range(75):
        total = 0.0
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        if epoch % 15 == 14:
            print(f"epoch {epoch + 1} train {total / 2:.3f} val {evaluate(model, val_ids):.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
