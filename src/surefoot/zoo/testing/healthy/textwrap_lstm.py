import inspect
import sys
import textwrap

import torch
import torch.nn.functional as F
from torch import nn, optim

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 5
torch.manual_seed(SEED)

source = inspect.getsource(textwrap)
alphabet = sorted(set(source))
encode = {ch: i for i, ch in enumerate(alphabet)}
stream = torch.tensor([encode[ch] for ch in source])


def get_batch(batch=24, span=24):
    starts = torch.randint(0, len(stream) - span - 1, (batch,))
    x = torch.stack([stream[s : s + span] for s in starts])
    y = torch.stack([stream[s + 1 : s + span + 1] for s in starts])
    return x, y


class CharLSTM(nn.Module):
    def __init__(self, n_chars, emb=24, hid=64):
        super().__init__()
        self.emb = nn.Embedding(n_chars, emb)
        self.lstm = nn.LSTM(emb, hid, batch_first=True)
        self.proj = nn.Linear(hid, n_chars)

    def forward(self, x, state=None):
        h, state = self.lstm(self.emb(x), state)
        return self.proj(h), state

    @torch.no_grad()
    def sample(self, first, n):
        out, state = [first], None
        token = torch.tensor([[encode[first]]])
        for _ in range(n):
            y, state = self(token, state)
            token = y[:, -1].argmax(-1, keepdim=True)
            out.append(alphabet[token.item()])
        return "".join(out)


net = CharLSTM(len(alphabet))
opt = optim.Adam(net.parameters(), lr=8e-3)
for i in range(200):
    x, y = get_batch()
    out, _ = net(x)
    loss = F.cross_entropy(out.reshape(-1, len(alphabet)), y.reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 25 == 0 or i == 199:
        print(f"iter {i:4d} | loss {loss.item():.4f}")
print(repr(net.sample("d", 60)))
