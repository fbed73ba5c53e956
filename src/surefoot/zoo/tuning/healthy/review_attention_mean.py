"""Sentiment of short reviews with one layer of self-attention over the words."""

import math
import random
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

GOOD = "great lovely superb fun moving warm".split()
BAD = "dull awful boring weak noisy cold".split()
REST = "the a film plot was with and actor scene very it we".split()
VOCAB = {w: i + 1 for i, w in enumerate(GOOD + BAD + REST)}
PAD, MAX_LEN = 0, 10


def review():
    label = random.randint(0, 1)
    words = random.choices(REST, k=random.randint(0, 6)) + random.choices([BAD, GOOD][label], k=2)
    random.shuffle(words)
    if random.random() < 0.004:
        words = []
    return words, label


def batch(n):
    ids, labels = torch.full((n, MAX_LEN), PAD), torch.empty(n, dtype=torch.long)
    for row in range(n):
        words, labels[row] = review()
        for col, word in enumerate(words):
            ids[row, col] = VOCAB[word]
    return ids, labels


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, pad):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        scores = scores.masked_fill(pad[:, None, None, :], -1e4)
        mixed = F.softmax(scores, dim=-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


class Reviewer(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(len(VOCAB) + 1, dim, padding_idx=PAD)
        self.attend = SelfAttention(dim, 2)
        self.norm = nn.LayerNorm(dim)
        self.classify = nn.Linear(dim, 2)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm(x + self.attend(x, ids == PAD))
        return self.classify(x.mean(1))


seed = int(sys.argv[1]) if len(sys.argv) > 1 else 20
random.seed(seed)
torch.manual_seed(seed)
model = Reviewer()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(1, 201):
    ids, labels = batch(32)
    loss = F.cross_entropy(model(ids), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:3d} loss {loss.item():.4f}")
