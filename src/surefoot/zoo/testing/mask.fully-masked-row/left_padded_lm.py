import inspect
import sys
import textwrap

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 60)

lines = [
    line.rstrip()
    for line in inspect.getsource(textwrap).splitlines()
    if len(line.strip()) >= 8 and len(line.rstrip()) <= 40
]
chars = ["<pad>"] + sorted({c for line in lines for c in line} | {"\n"})
stoi = {c: i for i, c in enumerate(chars)}
T = 41


def collate(picked):
    """Pad on the left, so that every line ends at the last position."""
    out = torch.zeros(len(picked), T + 1, dtype=torch.long)
    for row, line in enumerate(picked):
        ids = [stoi[c] for c in line] + [stoi["\n"]]
        out[row, T + 1 - len(ids) :] = torch.tensor(ids)
    return out


class Block(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, blocked):
        h = self.norm1(x)
        mixed, weights = self.attention(h, h, h, attn_mask=blocked)
        x = x + mixed
        return x + self.mlp(self.norm2(x)), weights


class LineModel(nn.Module):
    def __init__(self, dim=48, heads=4):
        super().__init__()
        self.heads = heads
        self.tok = nn.Embedding(len(chars), dim)
        self.pos = nn.Parameter(torch.randn(T, dim) * 0.02)
        self.block = Block(dim, heads)
        self.out = nn.Linear(dim, len(chars))

    def forward(self, ids):
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        blocked = future | (ids == 0)[:, None, :]
        x, _ = self.block(self.tok(ids) + self.pos, blocked.repeat_interleave(self.heads, 0))
        return self.out(x)


model = LineModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for it in range(150):
    pick = torch.randint(len(lines), (16,)).tolist()
    data = collate([lines[i] for i in pick])
    logits = model(data[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), data[:, 1:], ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 15 == 0:
        print(f"iter {it} loss {loss.item():.4f}")
