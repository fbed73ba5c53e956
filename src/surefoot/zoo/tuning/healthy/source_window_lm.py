import argparse
import inspect
import re
from collections import Counter

import torch
import torch.nn as nn

p = argparse.ArgumentParser()
p.add_argument("seed", nargs="?", type=int, default=2)
p.add_argument("--context", type=int, default=6)
p.add_argument("--min-count", type=int, default=3)
args = p.parse_args()
torch.manual_seed(args.seed)

words = re.findall(r"\w+|[^\w\s]", inspect.getsource(argparse))
counts = Counter(words)
vocab = sorted(w for w, c in counts.items() if c >= args.min_count)

stoi = {w: i for i, w in enumerate(vocab)}
stoi["<unk>"] = len(stoi)
stoi["<eos>"] = len(stoi)
vocab_size = len(stoi)
ids = torch.tensor([stoi.get(w, stoi["<unk>"]) for w in words] + [stoi["<eos>"]])
print(f"{len(ids)} tokens, {vocab_size} words")


class WindowLM(nn.Module):
    def __init__(self, vocab_size, context, dim=24, hidden=64):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, dim)
        self.net = nn.Sequential(nn.Linear(context * dim, hidden), nn.Tanh(), nn.Linear(hidden, vocab_size))

    def forward(self, x):
        return self.net(self.emb(x).flatten(1))


model = WindowLM(vocab_size, args.context)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
windows = ids.unfold(0, args.context + 1, 1)
for step in range(300):
    batch = windows[torch.randint(len(windows), (32,))]
    loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(step, round(loss.item(), 3))
