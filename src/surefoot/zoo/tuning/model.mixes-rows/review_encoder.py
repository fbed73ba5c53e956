import sys

import torch
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)

VOCABULARY, LENGTH = 80, 18
reviews = torch.randint(0, VOCABULARY, (3000, LENGTH))
positive = (reviews < 20).sum(1) > (reviews >= 60).sum(1)
labels = positive.long()


class Encoder(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.summary = nn.Parameter(torch.randn(width) * 0.02)
        self.attention = nn.MultiheadAttention(width, 4)
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, 2)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        summary = self.summary.expand(len(tokens), 1, -1)
        x = torch.cat([summary, x], dim=1)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.score(x[:, 0])


model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loss_fn = nn.CrossEntropyLoss()

for step in range(300):
    rows = torch.randint(0, len(reviews), (48,))
    loss = loss_fn(model(reviews[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
