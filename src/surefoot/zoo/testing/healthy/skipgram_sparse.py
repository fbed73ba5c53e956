"""Skip-gram with negative sampling over the words of a library module; sparse gradients and SparseAdam."""

import collections
import inspect
import re
import sys
import tarfile

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 30
rng = np.random.default_rng(seed)
torch.manual_seed(seed)
words = re.findall(r"[a-z_]+", inspect.getsource(tarfile).lower())
counts = collections.Counter(words)
vocab = [w for w, c in counts.most_common() if c >= 5]
index = {w: i for i, w in enumerate(vocab)}
ids = np.array([index[w] for w in words if w in index])
frequency = np.array([counts[w] for w in vocab], dtype=np.float64) ** 0.75
frequency /= frequency.sum()
print(f"{len(ids)} tokens, {len(vocab)} words")

offsets = rng.integers(1, 4, size=len(ids)) * rng.choice([-1, 1], size=len(ids))
centre = np.arange(len(ids))
keep = (centre + offsets >= 0) & (centre + offsets < len(ids))
pairs = np.stack([ids[centre[keep]], ids[(centre + offsets)[keep]]], axis=1)

inputs = nn.Embedding(len(vocab), 32, sparse=True)
outputs = nn.Embedding(len(vocab), 32, sparse=True)
nn.init.uniform_(inputs.weight, -0.5 / 32, 0.5 / 32)
nn.init.zeros_(outputs.weight)
optimizer = torch.optim.SparseAdam([inputs.weight, outputs.weight], lr=1e-2)
NEGATIVES = 5

running = []
for epoch in range(4):
    rng.shuffle(pairs)
    for start in range(0, len(pairs) - 127, 128):
        batch = torch.from_numpy(pairs[start : start + 128])
        negative = torch.from_numpy(rng.choice(len(vocab), (128, NEGATIVES), p=frequency))
        u = inputs(batch[:, 0])
        positive_score = (u * outputs(batch[:, 1])).sum(1)
        negative_score = torch.einsum("bd,bkd->bk", u, outputs(negative))
        loss = -F.logsigmoid(positive_score).mean() - F.logsigmoid(-negative_score).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running.append(loss.item())
    print(f"epoch {epoch}  loss {np.mean(running[-80:]):.4f}  (started at {running[0]:.4f})")

with torch.no_grad():
    unit = F.normalize(inputs.weight, dim=1)
    for word in ("self", "name"):
        near = (unit @ unit[index[word]]).topk(4).indices[1:].tolist()
        print(word, "->", [vocab[i] for i in near])
