import random
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 18
random.seed(seed)
torch.manual_seed(seed)

# reverse a short string of letters, position by position
LETTERS = 10
LENGTH = 6


class Reverser(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 16)
        self.encode = nn.GRU(16, dim, batch_first=True)
        self.decode = nn.GRU(LETTERS, dim, batch_first=True)
        self.out = nn.Linear(dim, LETTERS)

    def forward(self, source, shifted):
        _, state = self.encode(self.embed(source))
        hidden, _ = self.decode(F.one_hot(shifted, LETTERS).float(), state)
        return self.out(hidden)


model = Reverser()
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
for it in range(300):
    source = torch.tensor([[random.randrange(1, LETTERS) for _ in range(LENGTH)] for _ in range(32)])
    target = source.flip(1)
    shifted = F.pad(target[:, :-1], (1, 0))
    scores = model(source, shifted)
    loss = F.nll_loss(scores.transpose(1, 2), target)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    if it % 30 == 29:
        right = (scores.argmax(-1) == target).float().mean().item()
        print(f"iteration {it + 1}: loss {loss.item():.3f}, letters right {right:.3f}")
