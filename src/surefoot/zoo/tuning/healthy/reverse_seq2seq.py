"""GRU encoder-decoder that reverses digit strings, teacher forcing during training, greedy decoding after."""

import argparse

import torch
from torch import nn

PAD, BOS, EOS, OFFSET = 0, 1, 2, 3


def batch_of(n, generator):
    lengths = torch.randint(3, 7, (n,), generator=generator)
    source = torch.full((n, 6), PAD)
    target = torch.full((n, 8), PAD)
    for i, length in enumerate(lengths.tolist()):
        word = torch.randint(5, (length,), generator=generator) + OFFSET
        source[i, 6 - length :] = word
        target[i, 0] = BOS
        target[i, 1 : length + 1] = word.flip(0)
        target[i, length + 1] = EOS
    return source, target


class Seq2Seq(nn.Module):
    def __init__(self, vocab=8, width=72):
        super().__init__()
        self.embed = nn.Embedding(vocab, 24, padding_idx=PAD)
        self.encoder = nn.GRU(24, width, batch_first=True)
        self.decoder = nn.GRU(24, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, source, target_in):
        _, state = self.encoder(self.embed(source))
        hidden, _ = self.decoder(self.embed(target_in), state)
        return self.out(hidden)

    @torch.no_grad()
    def generate(self, source, steps=7):
        _, state = self.encoder(self.embed(source))
        token, result = torch.full((len(source), 1), BOS), []
        for _ in range(steps):
            hidden, state = self.decoder(self.embed(token), state)
            token = self.out(hidden).argmax(-1)
            result.append(token)
        return torch.cat(result, dim=1)


parser = argparse.ArgumentParser()
parser.add_argument("seed", type=int, nargs="?", default=0)
seed = parser.parse_args().seed
torch.manual_seed(seed)
generator = torch.Generator().manual_seed(seed)
model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=220)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
for step in range(220):
    source, target = batch_of(48, generator)
    logits = model(source, target[:, :-1])
    loss = criterion(logits.flatten(0, 1), target[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")

source, target = batch_of(200, generator)
answer = model.generate(source)
valid = target[:, 1:] != PAD
right = ((answer == target[:, 1:]) | ~valid).all(1).float().mean().item()
print(f"whole strings right: {right:.3f}")
