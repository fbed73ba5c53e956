"""Count the ones in a bit string with an LSTM; strings grow longer as training goes on."""

import sys

import torch
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 26)
STAGES = [(4, 90), (8, 130), (12, 200)]


class Counter(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, bits):
        return self.out(self.lstm(bits)[0][:, -1]).squeeze(1)


def make(batch, length):
    probability = torch.rand(batch, 1)
    bits = (torch.rand(batch, length) < probability).float()
    return bits.unsqueeze(-1), bits.sum(1)


model = Counter()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, sum(steps for _, steps in STAGES))
step = 0
for length, steps in STAGES:
    for _ in range(steps):
        bits, count = make(64, int(torch.randint(2, length + 1, ())))
        loss = nn.functional.smooth_l1_loss(model(bits), count)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 30 == 0:
            print(f"step {step:4d}  up to {length:2d} bits  loss {loss.item():.4f}")
        step += 1

model.eval()
with torch.no_grad():
    for length, _ in STAGES:
        bits, count = make(500, length)
        print(f"length {length:2d}: exact {(model(bits).round() == count).float().mean().item():.3f}")
