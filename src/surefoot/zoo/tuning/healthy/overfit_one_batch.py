"""Sanity check before the long run: can the model memorise a single batch?"""

import inspect
import random
import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
text = inspect.getsource(random)
alphabet = sorted(set(text))
codes = torch.tensor([alphabet.index(c) for c in text])


class CharLSTM(nn.Module):
    def __init__(self, vocab, width=96):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.out(self.lstm(self.embed(ids))[0])


starts = torch.randint(len(codes) - 25, (4,))
batch = torch.stack([codes[s : s + 25] for s in starts])
model = CharLSTM(len(alphabet))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

for step in range(200):
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 25 == 0 or step == 199:
        hits = (logits.argmax(-1) == batch[:, 1:]).float().mean().item()
        print(f"step {step:3d}  loss {loss.item():.4f}  accuracy on the batch {hits:.3f}")

print("memorised" if loss.item() < 0.1 else "NOT memorised")
