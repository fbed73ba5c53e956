"""Average of a sequence, with a rectified recurrent net started at the identity."""

import sys

import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 71
torch.manual_seed(seed)
LENGTH, HIDDEN, BATCH = 40, 32, 32


class Averager(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, HIDDEN, nonlinearity="relu", batch_first=True)
        nn.init.eye_(self.rnn.weight_hh_l0)
        nn.init.zeros_(self.rnn.bias_hh_l0)
        nn.init.zeros_(self.rnn.bias_ih_l0)
        nn.init.normal_(self.rnn.weight_ih_l0, std=0.1)
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        states, _ = self.rnn(x)
        return self.out(states[:, -1]).squeeze(-1)


def batch():
    values = torch.rand(BATCH, LENGTH)
    return values.unsqueeze(-1), 6 * values.mean(1) - 3


model = Averager()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(200):
    x, y = batch()
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0 or step == 199:
        print(f"step {step:4d} mse {loss.item():.4g}")
