"""Vanilla RNN that recalls the first symbol after a delay."""

import argparse

import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_


class Recall(nn.Module):
    def __init__(self, symbols, hidden):
        super().__init__()
        self.rnn = nn.RNN(symbols, hidden, nonlinearity="tanh", batch_first=True)
        self.readout = nn.Linear(hidden, symbols)
        nn.init.orthogonal_(self.rnn.weight_hh_l0)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.readout(out[:, -1])


def sample(batch, symbols, delay):
    first = torch.randint(symbols - 1, (batch,))
    ids = torch.full((batch, delay), symbols - 1)
    ids[:, 0] = first
    return nn.functional.one_hot(ids, symbols).float(), first


def run(args):
    torch.manual_seed(args.seed)
    model = Recall(6, 64)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    for step in range(1, args.steps + 1):
        x, y = sample(32, 6, args.delay)
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step}: loss {loss.item():.4f}, grad norm before clipping {norm.item():.3f}")
    with torch.no_grad():
        x, y = sample(500, 6, args.delay)
        print(f"recall accuracy: {(model(x).argmax(1) == y).float().mean().item():.3f}")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("seed", type=int, nargs="?", default=3)
parser.add_argument("--steps", type=int, default=320)
parser.add_argument("--delay", type=int, default=15)
parser.add_argument("--clip", type=float, default=0.25)
run(parser.parse_args())
