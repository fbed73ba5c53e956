import sys

import torch
import torch.nn.functional as F
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 5
g = torch.Generator().manual_seed(seed)
torch.manual_seed(seed)

VOCAB, DIM, DOC = 1200, 12, 30
polarity = torch.randn(VOCAB, generator=g)
docs = torch.randint(0, VOCAB, (4000, DOC), generator=g)
labels = (polarity[docs].sum(1) > 0).float()
vectors = torch.randn(VOCAB, DIM, generator=g) * 0.3


class BagOfWords(nn.Module):
    def __init__(self, vectors):
        super().__init__()
        self.words = nn.Embedding.from_pretrained(vectors)
        self.hidden = nn.Linear(vectors.shape[1], 16)
        self.out = nn.Linear(16, 1)

    def forward(self, ids):
        pooled = self.words(ids).mean(dim=1)
        return self.out(F.relu(self.hidden(pooled))).squeeze(-1)


model = BagOfWords(vectors)
print(f"{sum(p.numel() for p in model.parameters())} parameters")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(8):
    total, right = 0.0, 0
    for idx in torch.randperm(3200, generator=g).split(64):
        logits = model(docs[idx])
        loss = F.binary_cross_entropy_with_logits(logits, labels[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(idx)
        right += ((logits > 0).float() == labels[idx]).sum().item()
    print(f"epoch {epoch}: loss {total / 3200:.4f} acc {right / 3200:.3f}")

with torch.no_grad():
    test = ((model(docs[3200:]) > 0).float() == labels[3200:]).float().mean().item()
print(f"test acc {test:.3f}")
