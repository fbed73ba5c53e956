"""Weight on a load cell from a minute of noisy readings."""

import sys

import torch
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 71
torch.manual_seed(seed)
LENGTH, HIDDEN, BATCH = 60, 32, 32


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, HIDDEN, nonlinearity="relu", batch_first=True)
        nn.init.eye_(self.rnn.weight_hh_l0)
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        states, _ = self.rnn(x)
        return self.out(states[:, -1]).squeeze(-1)


def readings():
    weight = torch.randn(BATCH)
    noise = 0.5 * torch.randn(BATCH, LENGTH)
    return (weight[:, None] + noise).unsqueeze(-1), weight


model = Scale()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for step in range(200):
    x, weight = readings()
    loss = nn.functional.mse_loss(model(x), weight)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0 or step == 199:
        print(f"step {step:4d} mse {loss.item():.4g}")
