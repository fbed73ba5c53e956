"""A small character transformer, trained on the source of a standard module."""

import argparse
import calendar
import inspect

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("seed", nargs="?", type=int, default=80)
parser.add_argument("--context", type=int, default=24)
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()
torch.manual_seed(args.seed)

text = inspect.getsource(calendar)
chars = sorted(set(text))
to_id = {c: i for i, c in enumerate(chars)}
data = torch.tensor([to_id[c] for c in text])
split = int(0.9 * len(data))


class CharTransformer(nn.Module):
    def __init__(self, vocab, context, dim=32, heads=4, layers=1):
        super().__init__()
        self.context = context
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(context, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        t = ids.shape[1]
        x = self.tok(ids) + self.pos(torch.arange(t))
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        return self.head(self.blocks(x, mask=mask, is_causal=True))

    @torch.no_grad()
    def generate(self, ids, n):
        for _ in range(n):
            logits = self(ids[:, -self.context :])[:, -1]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return ids


def get_batch(source, size=16):
    at = torch.randint(len(source) - args.context - 1, (size,))
    x = torch.stack([source[i : i + args.context] for i in at])
    y = torch.stack([source[i + 1 : i + args.context + 1] for i in at])
    return x, y


model = CharTransformer(len(chars), args.context)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(1, args.steps + 1):
    x, y = get_batch(data[:split])
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")

sample = model.generate(data[:8].unsqueeze(0), 40)[0]
print(repr("".join(chars[i] for i in sample.tolist())))
