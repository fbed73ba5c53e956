"""Copy-the-marked-token task with a stack of standard encoder layers."""

import sys

import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 3
torch.manual_seed(seed)
VOCAB, LENGTH, WIDTH, DEPTH, STEPS = 16, 8, 32, 6, 130


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.mark = nn.Embedding(2, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, marks):
        h = self.encoder(self.token(tokens) + self.mark(marks))
        return self.out(h[:, 0])


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05, betas=(0.9, 0.98))
inverse_sqrt = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: (s + 1) ** -0.5)
for step in range(STEPS):
    tokens = torch.randint(0, VOCAB, (32, LENGTH))
    where = torch.randint(0, LENGTH, (32,))
    marks = nn.functional.one_hot(where, LENGTH)
    target = tokens[torch.arange(32), where]
    loss = nn.functional.cross_entropy(model(tokens, marks), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    inverse_sqrt.step()
    if step % 25 == 0 or step == STEPS - 1:
        print(f"step {step} loss {loss.item():.3f}")
