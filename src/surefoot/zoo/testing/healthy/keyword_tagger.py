"""Multi-label tagging with a small transformer encoder."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 9
torch.manual_seed(seed)

VOCAB, TAGS, LENGTH = 60, 8, 12


def documents(n):
    tokens = torch.randint(0, VOCAB, (n, LENGTH))
    # a tag applies when one of its three keywords occurs
    keywords = torch.arange(TAGS * 3).view(TAGS, 3)
    tags = (tokens[:, :, None, None] == keywords).any(3).any(1).float()
    return tokens, tags


class Tagger(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(dim, TAGS)

    def forward(self, tokens):
        h = self.encoder(self.embed(tokens) + self.position)
        return self.head(h.amax(dim=1))


def f1(predicted, truth):
    hit = (predicted & truth).sum().item()
    return 2 * hit / max(1, predicted.sum().item() + truth.sum().item())


model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
test_tokens, test_tags = documents(400)
for step in range(1, 251):
    tokens, tags = documents(48)
    scores = model(tokens)
    loss = F.binary_cross_entropy_with_logits(scores, tags)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        with torch.no_grad():
            quality = f1(model(test_tokens) > 0, test_tags.bool())
        print(f"step {step} loss {loss.item():.4f} f1 {quality:.3f}")
