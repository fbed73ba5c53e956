"""Masked-token pretraining on lines of source code, a handful of lines per step."""

import inspect
import random
import re
import sys
import textwrap

import torch
from torch import nn

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 44
random.seed(SEED)
torch.manual_seed(SEED)

LENGTH = 8
lines = [re.findall(r"\w+|[^\w\s]", line) for line in inspect.getsource(textwrap).splitlines()]
lines = [line[:LENGTH] for line in lines if len(line) >= 4]
vocab = {w: i + 2 for i, w in enumerate(sorted({w for line in lines for w in line}))}
PAD, MASK = 0, 1


def make_batch(size=4, rate=0.15):
    tokens = torch.full((size, LENGTH), PAD)
    for row, line in enumerate(random.sample(lines, size)):
        tokens[row, : len(line)] = torch.tensor([vocab[w] for w in line])
    chosen = (torch.rand(tokens.shape) < rate) & (tokens != PAD)
    labels = torch.where(chosen, tokens, -100)
    inputs = torch.where(chosen, MASK, tokens)
    return inputs, labels


class MaskedModel(nn.Module):
    def __init__(self, n, dim=48):
        super().__init__()
        self.tok = nn.Embedding(n, dim, padding_idx=PAD)
        self.pos = nn.Embedding(LENGTH, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(dim, n)

    def forward(self, x):
        h = self.tok(x) + self.pos.weight
        return self.out(self.blocks(h, src_key_padding_mask=x == PAD))


def masked_loss(logits, labels):
    valid = (labels != -100).float()
    picked = logits.log_softmax(-1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return -(picked * valid).sum() / valid.sum()


model = MaskedModel(len(vocab) + 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
average = None
for step in range(1, 501):
    inputs, labels = make_batch()
    loss = masked_loss(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
    if step % 50 == 0:
        print(f"step {step} loss {average:.3f}")
