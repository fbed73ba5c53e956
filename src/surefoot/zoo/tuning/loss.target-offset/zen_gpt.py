import codecs
import sys
import this

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)

text = codecs.decode(this.s, "rot13") * 4
letters = sorted(set(text))
ids = torch.tensor([letters.index(letter) for letter in text])
VOCAB, LENGTH, WIDTH = len(letters), 32, 48


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))

    def forward(self, x, labels):
        hidden = self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1])))
        logits = self.head(hidden)
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


model = Gpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(120):
    starts = torch.randint(len(ids) - LENGTH - 1, (16,)).tolist()
    x = torch.stack([ids[i : i + LENGTH] for i in starts])
    y = torch.stack([ids[i + 1 : i + LENGTH + 1] for i in starts])
    loss = model(x, labels=y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
