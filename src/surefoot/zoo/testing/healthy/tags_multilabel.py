"""Multi-label tagging from bags of tokens, with an EmbeddingBag."""

import sys

import numpy as np
import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 100
rng = np.random.default_rng(seed)
torch.manual_seed(seed)
N_TAGS, VOCAB = 12, 300
tag_words = [rng.choice(VOCAB, 12, replace=False) for _ in range(N_TAGS)]


def document():
    tags = np.flatnonzero(rng.random(N_TAGS) < 0.12)
    words = list(rng.integers(VOCAB, size=12))
    for t in tags:
        words.extend(rng.choice(tag_words[t], 6))
    label = np.zeros(N_TAGS, dtype=np.float32)
    label[tags] = 1
    return words, label


corpus = [document() for _ in range(2400)]
train, test = corpus[:2000], corpus[2000:]


def collate(docs):
    flat = torch.tensor([int(w) for words, _ in docs for w in words])
    starts = np.cumsum([0] + [len(words) for words, _ in docs[:-1]])
    return flat, torch.tensor(starts), torch.tensor(np.stack([label for _, label in docs]))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, 48, mode="mean")
        self.out = nn.Linear(48, N_TAGS)

    def forward(self, flat, starts):
        return self.out(self.bag(flat, starts))


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
criterion = nn.BCEWithLogitsLoss()
for epoch in range(8):
    order = rng.permutation(len(train))
    total = 0.0
    for i in range(0, len(order), 64):
        flat, starts, label = collate([train[j] for j in order[i : i + 64]])
        optimizer.zero_grad()
        loss = criterion(model(flat, starts), label)
        loss.backward()
        optimizer.step()
        total += loss.item()
    with torch.no_grad():
        flat, starts, label = collate(test)
        guess = model(flat, starts) > 0
    truth = label.bool()
    precision = (guess & truth).sum().item() / max(1, guess.sum().item())
    recall = (guess & truth).sum().item() / truth.sum().item()
    print(f"epoch {epoch} loss {total / (len(train) / 64):.4f} precision {precision:.3f} recall {recall:.3f}")
