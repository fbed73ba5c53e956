"""A two-layer causal transformer over the characters of a standard library module."""

import inspect
import math
import sys
import textwrap
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    context: int = 32
    width: int = 48
    heads: int = 4
    layers: int = 2
    batch: int = 12
    steps: int = 240
    warmup: int = 25
    lr: float = 3e-3
    weight_decay: float = 0.1


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv = nn.Linear(c.width, 3 * c.width)
        self.out = nn.Linear(c.width, c.width)
        self.mlp = nn.Sequential(nn.Linear(c.width, 4 * c.width), nn.GELU(), nn.Linear(4 * c.width, c.width))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab, c):
        super().__init__()
        self.tokens = nn.Embedding(vocab, c.width)
        self.positions = nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)
        self.lm_head = nn.Linear(c.width, vocab, bias=False)
        self.lm_head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


c = Config()
torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 1337)
text = inspect.getsource(textwrap)
chars = sorted(set(text))
data = torch.tensor([chars.index(ch) for ch in text])
split = int(0.9 * len(data))
train_data, val_data = data[:split], data[split:]


def get_batch(source):
    start = torch.randint(len(source) - c.context - 1, (c.batch,))
    window = torch.stack([source[s : s + c.context + 1] for s in start])
    return window[:, :-1], window[:, 1:]


model = GPT(len(chars), c)
decay = [p for p in model.parameters() if p.ndim >= 2]
no_decay = [p for p in model.parameters() if p.ndim < 2]
opt = torch.optim.AdamW(
    [{"params": decay, "weight_decay": c.weight_decay}, {"params": no_decay, "weight_decay": 0.0}],
    lr=c.lr,
    betas=(0.9, 0.95),
)


def lr_factor(step):
    if step < c.warmup:
        return (step + 1) / c.warmup
    progress = (step - c.warmup) / (c.steps - c.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_factor)
for step in range(c.steps):
    inputs, targets = get_batch(train_data)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    if step % 40 == 0 or step == c.steps - 1:
        model.eval()
        with torch.no_grad():
            vx, vy = get_batch(val_data)
            val = F.cross_entropy(model(vx).flatten(0, 1), vy.flatten()).item()
        model.train()
        print(f"step {step:3d} | train {loss.item():.3f} | val {val:.3f} | lr {sched.get_last_lr()[0]:.2e}")
