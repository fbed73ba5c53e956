"""GRU encoder-decoder that reverses words of different lengths."""

import random
import sys

import torch
from torch import nn

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 0
random.seed(SEED)
torch.manual_seed(SEED)
PAD, START, END, VOCAB, LONGEST = 0, 1, 2, 23, 24


def batch(count=32):
    source, target = torch.full((count, LONGEST), PAD), torch.full((count, LONGEST), PAD)
    for row in range(count):
        word = [random.randint(3, VOCAB - 1) for _ in range(random.randint(2, 9))]
        source[row, : len(word)] = torch.tensor(word)
        target[row, : len(word) + 2] = torch.tensor([START, *word[::-1], END])
    return source, target


class Reverser(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, 32), nn.Embedding(VOCAB, 32)
        self.encoder = nn.GRU(32, 64, batch_first=True)
        self.decoder = nn.GRU(32, 64, batch_first=True)
        self.out = nn.Linear(64, VOCAB)

    def forward(self, source, target):
        _, state = self.encoder(self.source(source))
        hidden, _ = self.decoder(self.target(target), state)
        return self.out(hidden)


model = Reverser()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss()
for step in range(150):
    source, target = batch()
    logits = model(source, target[:, :-1])
    loss = criterion(logits.reshape(-1, VOCAB), target[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
