"""Predicts the next note of random walks on a scale."""

import sys

import torch
import torch.nn as nn

generator = torch.Generator().manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
torch.manual_seed(generator.initial_seed())
NOTES = 24


def melodies(count, length=40):
    moves = torch.randint(-2, 3, (count, length), generator=generator)
    start = torch.randint(NOTES, (count, 1), generator=generator)
    return (start + moves.cumsum(1)) % NOTES


class Composer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(NOTES, 32)
        self.lstm = nn.LSTM(32, 96, batch_first=True)
        self.decoder = nn.Linear(96, NOTES)

    def forward(self, notes):
        hidden, _ = self.lstm(self.embedding(notes))
        return self.decoder(hidden)


def train(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    for step in range(steps):
        notes = melodies(24)
        prediction = model(notes)
        loss = criterion(prediction.transpose(1, 2), notes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    print("loss", loss.item())


train(Composer(), 150)
