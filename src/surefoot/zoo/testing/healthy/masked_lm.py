"""Masked token modelling with a bidirectional encoder (15 % of the tokens are hidden).

The corpus has topics: a document uses the few words of its own topic, in any order.
"""

import argparse
import keyword
import math
import random

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("seed", type=int, nargs="?", default=13)
parser.add_argument("--steps", type=int, default=220)
args = parser.parse_args()
random.seed(args.seed)
torch.manual_seed(args.seed)

words = sorted(keyword.kwlist + keyword.softkwlist)
MASK = len(words)
SEQ, BATCH, DIM = 24, 16, 48
topics = [random.sample(range(len(words)), 4) for _ in range(8)]
documents = torch.tensor([random.choices(random.choice(topics), k=SEQ) for _ in range(1500)])
documents, held_out = documents[:1200], documents[1200:]


def batch_from(source):
    original = source[torch.randint(len(source), (BATCH,))]
    chosen = torch.rand(original.shape) < 0.15
    chosen[:, random.randrange(SEQ)] = True
    labels = original.masked_fill(~chosen, -100)
    return original.masked_fill(chosen, MASK), labels


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(len(words) + 1, DIM)
        self.pos = nn.Parameter(0.02 * torch.randn(1, SEQ, DIM))
        layer = nn.TransformerEncoderLayer(
            DIM, nhead=4, dim_feedforward=96, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(DIM)
        self.bias = nn.Parameter(torch.zeros(len(words)))
        nn.init.normal_(self.tok.weight, std=0.05)

    def forward(self, ids):
        h = self.norm(self.body(self.tok(ids) + self.pos))
        return h @ self.tok.weight[:-1].T + self.bias


model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
warmup = 20
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda t: min((t + 1) / warmup, 0.5 * (1 + math.cos(math.pi * min(1.0, t / args.steps)))),
)
criterion = nn.CrossEntropyLoss(ignore_index=-100)
for step in range(args.steps):
    ids, labels = batch_from(documents)
    loss = criterion(model(ids).reshape(-1, len(words)), labels.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % 40 == 0:
        print(f"step {step:4d}  masked loss {loss.item():.3f}")

model.eval()
with torch.no_grad():
    losses = []
    for _ in range(10):
        ids, labels = batch_from(held_out)
        losses.append(criterion(model(ids).reshape(-1, len(words)), labels.reshape(-1)).item())
print(f"held-out masked loss {sum(losses) / len(losses):.3f} (uniform would be {math.log(len(words)):.3f})")
