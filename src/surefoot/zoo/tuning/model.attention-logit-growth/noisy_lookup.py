"""Soft dictionary: look a value up under a blurred key."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 83
torch.manual_seed(seed)
KEY, VALUE, SLOTS, WIDTH, HEADS, BATCH, STEPS = 8, 4, 6, 32, 2, 32, 450


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.key_in = nn.Linear(KEY, WIDTH)
        self.value_in = nn.Linear(VALUE, WIDTH)
        self.query = nn.Linear(WIDTH, HEADS * WIDTH)
        self.key = nn.Linear(WIDTH, HEADS * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Sequential(nn.Linear(HEADS * WIDTH, 48), nn.GELU(), nn.Linear(48, VALUE))

    def forward(self, probe, keys, values):
        b = len(probe)
        q = self.query(self.norm(self.key_in(probe))).view(b, HEADS, 1, WIDTH)
        k = self.key(self.norm(self.key_in(keys))).view(b, SLOTS, HEADS, WIDTH).transpose(1, 2)
        attention = torch.softmax(q @ k.transpose(2, 3), dim=-1)
        read = attention @ self.value_in(values).unsqueeze(1)
        return self.out(read.flatten(1))


model = Lookup()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, betas=(0.9, 0.95))
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=100)
recent = []
for step in range(1, STEPS + 1):
    keys = torch.randn(BATCH, SLOTS, KEY)
    values = torch.randn(BATCH, SLOTS, VALUE)
    pick = torch.randint(0, SLOTS, (BATCH,))
    rows = torch.arange(BATCH)
    probe = keys[rows, pick] + 0.3 * torch.randn(BATCH, KEY)
    loss = F.mse_loss(model(probe, keys, values), values[rows, pick])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warmup.step()
    recent.append(loss.item())
    if step % 50 == 0:
        print(f"step {step} mse {sum(recent[-50:]) / 50:.3f}")
