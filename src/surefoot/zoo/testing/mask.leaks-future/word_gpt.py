import inspect
import json.decoder
import math
import re
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    block_size: int = 16
    n_layer: int = 1
    n_head: int = 2
    n_embd: int = 48


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(config.block_size, config.block_size)))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (a.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for a in (q, k, v))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = F.softmax(att, dim=-1)
        att.masked_fill(self.bias[:T, :T] == 0, 0.0)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class GPT(nn.Module):
    def __init__(self, vocab, config):
        super().__init__()
        self.wte = nn.Embedding(vocab, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.attn = nn.ModuleList(CausalSelfAttention(config) for _ in range(config.n_layer))
        self.ln = nn.ModuleList(nn.LayerNorm(config.n_embd) for _ in range(config.n_layer + 1))
        self.lm_head = nn.Linear(config.n_embd, vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe.weight[: idx.size(1)]
        for ln, attn in zip(self.ln, self.attn):
            x = x + attn(ln(x))
        return self.lm_head(self.ln[-1](x))


torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 1337)
words = re.findall(r"\w+|[^\w\s]", inspect.getsource(json.decoder))
vocab = sorted(set(words))
ids = torch.tensor([vocab.index(w) for w in words])
config = GPTConfig()
model = GPT(len(vocab), config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
for it in range(200):
    ix = torch.randint(len(ids) - config.block_size - 1, (16,))
    x = torch.stack([ids[i : i + config.block_size] for i in ix])
    y = torch.stack([ids[i + 1 : i + 1 + config.block_size] for i in ix])
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if it % 20 == 0 or it == 199:
        print(f"iter {it}: loss {loss.item():.4f}")
