"""Intent of short commands: a transformer encoder over padded token lists."""

import random
import sys

import torch
from torch import nn

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(SEED)
random.seed(SEED)
PAD, WORDS, LENGTH = 0, 50, 16


def command():
    intent = random.randrange(4)
    words = random.choices(range(20, WORDS), k=random.randint(5, 12))
    words[random.randrange(1, len(words))] = 1 + intent
    return words + [PAD] * (LENGTH - len(words)), intent


def batch(rows):
    commands, intents = zip(*(command() for _ in range(rows)), strict=True)
    return torch.tensor(commands), torch.tensor(intents)


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.score = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = tokens != PAD
        seen = self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        return self.score(self.norm(x + seen)[:, 0])


model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(400):
    tokens, intents = batch(48)
    loss = nn.functional.cross_entropy(model(tokens), intents)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.3f}")
