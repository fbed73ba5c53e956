"""Sequence reversal with an encoder and a decoder."""

import sys

import torch
import torch.nn as nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 99
torch.manual_seed(seed)

VOCAB, LENGTH, HIDDEN = 10, 9, 40
START = VOCAB


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.rnn = nn.GRU(16, HIDDEN, batch_first=True)

    def forward(self, tokens):
        _, state = self.rnn(self.embed(tokens))
        return state


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB + 1, 16)
        self.rnn = nn.GRU(16, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens, state):
        hidden, _ = self.rnn(self.embed(tokens), state)
        return self.out(hidden)


encoder, decoder = Encoder(), Decoder()
enc_opt = torch.optim.Adam(encoder.parameters(), lr=8e-3)
dec_opt = torch.optim.Adam(decoder.parameters(), lr=8e-3)
loss_fn = nn.CrossEntropyLoss()


def repackage(state):
    return state.detach()


for step in range(301):
    source = torch.randint(0, VOCAB, (32, LENGTH))
    target = source.flip(1)
    shifted = torch.cat([torch.full((32, 1), START), target[:, :-1]], dim=1)
    state = repackage(encoder(source))
    logits = decoder(shifted, state)
    loss = loss_fn(logits.reshape(-1, VOCAB), target.reshape(-1))
    enc_opt.zero_grad()
    dec_opt.zero_grad()
    loss.backward()
    enc_opt.step()
    dec_opt.step()
    if step % 100 == 0:
        acc = (logits.argmax(-1) == target).float().mean().item()
        print(f"step {step}: loss {loss.item():.3f}, token accuracy {acc:.3f}")
